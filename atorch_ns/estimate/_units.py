"""What a plan gathers together, and in which precision a segment computes under it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from atorch_ns.profile import ParameterSpec, Segment, SegmentCost, Trace, precision_key
from atorch_ns.strategy import Plan

__all__ = [
    "DTYPE_BYTES",
    "LOSS_CALLS",
    "LOSS_NUMBERS",
    "Unit",
    "computed_in",
    "cost_of",
    "gathered_bytes",
    "reduced_bytes",
    "units_of",
]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8}
"""Bytes of an element, by torch name."""

LOSS_CALLS, LOSS_NUMBERS = 2, 3
"""All-reduces of a cross-entropy on parts of the logits, and the numbers for each token in them: the largest logit; the
sum of exponentials and the target's logit."""

_FLOATING = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together; equal ones of one segment are one unit with a count.

    Attributes:
        segment: index of its segment; -1 for the root, which holds what no other unit does.
        count: how many there are.
        parameters: of one of them, tied ones once.
    """

    segment: int
    count: int
    parameters: tuple[ParameterSpec, ...]

    @property
    def is_root(self) -> bool:
        """Whether it is the root, which stays gathered from the forward to the backward pass."""
        return self.segment < 0


def units_of(plan: Plan, trace: Trace) -> tuple[Unit, ...]:
    """The units of a plan that shards parameters or gradients, the root first, then in forward order.

    Blocks that share a parameter with something outside belong to the root, as fully_shard needs it.
    """
    chosen = [
        position
        for position, segment in enumerate(trace.segments)
        if segment.is_block and _is_unit(plan, segment) and not _shares(trace, position)
    ]
    rest = tuple(
        parameter
        for position, segment in enumerate(trace.segments)
        if position not in chosen
        for parameter in _own(segment.parameters) * segment.count
    )
    units = [Unit(p, trace.segments[p].count, _own(trace.segments[p].parameters)) for p in chosen]
    return tuple(unit for unit in (Unit(-1, 1, rest), *units) if unit.parameters)


def computed_in(plan: Plan) -> tuple[str, str | None]:
    """The weights' dtype as operators see it, and autocast's."""
    weights = plan.gather_dtype or plan.parameter_dtype
    return weights, plan.compute_dtype


def cost_of(plan: Plan, segment: Segment) -> SegmentCost:
    """The segment's cost in the precision of the plan, or in the nearest that was traced."""
    weights, autocast = computed_in(plan)
    exact = precision_key(weights, autocast)
    # Weights that are gathered in autocast's dtype cost what weights kept in it do, and a cast more at most.
    wanted = (exact, precision_key(weights, None), precision_key("float32", autocast), "float32")
    costs = segment.replaced_costs if plan.replaced and segment.replaced_costs else segment.costs
    for key in (*wanted, *costs):
        if key in costs:
            return costs[key]
    raise AssertionError(f"the segment {segment.name} has no costs")


def gathered_bytes(plan: Plan, parameters: Iterable[ParameterSpec]) -> int:
    """Bytes of these parameters as they are gathered, without padding."""
    return sum(p.num_elements * DTYPE_BYTES[stored_dtype(plan, p, plan.gather_dtype)] for p in parameters)


def reduced_bytes(plan: Plan, parameters: Iterable[ParameterSpec]) -> int:
    """Bytes of these parameters' gradients as they are reduced, without padding."""
    wanted = plan.reduce_dtype or plan.gather_dtype
    return sum(p.num_elements * DTYPE_BYTES[stored_dtype(plan, p, wanted)] for p in parameters if p.trainable)


def stored_dtype(plan: Plan, parameter: ParameterSpec, wanted: str | None) -> str:
    """The dtype of a parameter that the plan may hold in ``wanted``; integers stay what they are."""
    if parameter.dtype not in _FLOATING:
        return parameter.dtype
    kept = plan.parameter_dtype if plan.parameter_dtype != "float32" else parameter.dtype
    return wanted or kept


def _own(parameters: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    return tuple(parameter for parameter in parameters if parameter.tied_to is None)


def _is_unit(plan: Plan, segment: Segment) -> bool:
    if plan.units is None:
        return True
    if not plan.units:
        return False
    return any(matches(selector, segment) for selector in plan.units)


def matches(selector: str, segment: Segment) -> bool:
    """Whether a selector of modules means the blocks of a segment."""
    return selector.rpartition(".")[2] == segment.block_class or any(
        fnmatch.fnmatchcase(path, selector) for path in segment.paths
    )


def _shares(trace: Trace, position: int) -> bool:
    """Whether a block of the segment uses a parameter of another place, or lends one."""
    segment = trace.segments[position]
    if any(parameter.tied_to is not None for parameter in segment.parameters):
        return True
    owners = tuple(f"{path}." for path in segment.paths)
    return any(
        parameter.tied_to is not None and parameter.tied_to.startswith(owners)
        for other in trace.segments
        for parameter in other.parameters
    )
