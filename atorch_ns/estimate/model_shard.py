"""Model shard: the part of a model that each rank of a plan holds, and the share of each quantity on it.

Legend: R plans of one kind (or stages of them), S segments.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from atorch_ns.capture.operators import is_saved
from atorch_ns.costs.collectives import NUM_REPORTED, gradient_buckets
from atorch_ns.pipeline import RecomputeShare
from atorch_ns.profile import ForwardResult, ParameterSpec, Segment, SegmentCost, Trace, precision_key
from atorch_ns.strategy import AxisUse, PipelineParallelism, Plan

T = TypeVar("T")
_ABSENT: Any = object()


class Memo:
    """Values by key, for as long as one table is priced; arrays stand in keys as their holders."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, made where it is not known."""
        value: T = self._values.get(key, _ABSENT)  # keys are long: they are hashed once
        if value is _ABSENT:
            value = self._values[key] = make()
        return value


def groups(*columns: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Distinct values of rows of integer columns [R], ascending, each with the rows that have it."""
    # One number for each combination of values (mixed radix), so that one sort finds all groups.
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    order = np.argsort(code, kind="stable")
    ends = np.flatnonzero(np.diff(code[order])) + 1
    for rows in np.split(order, ends) if len(order) else ():
        yield tuple(int(column[rows[0]]) for column in columns), rows


def distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[K, C] distinct rows of a table [R, C] of integers from 0 on, ascending, and [R] the index of each."""
    spans = table.max(axis=0, initial=0) + 1
    if math.prod(spans.tolist()) >= 2**63:  # the code below would overflow
        keys, row = np.unique(table, axis=0, return_inverse=True)
        return keys, row.reshape(-1)
    code = np.zeros(len(table), dtype=np.int64)  # numbers are sorted faster than rows
    for column, span in zip(table.T, spans.tolist(), strict=True):
        code = code * span + column
    _, first, row = np.unique(code, return_index=True, return_inverse=True)
    return table[first], row


DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8}
"""Bytes of an element, by torch name."""

LOSS_CALLS, LOSS_NUMBERS = 2, 3
"""All-reduces of a cross-entropy on parts of the logits, and their numbers for each token: the largest logit;
the sum of exponentials and the target's logit."""

_FLOATING = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are gathered and reduced together; equal ones of one segment are one unit with a count.

    Attributes:
        segment: index of its segment; -1 for the root, which holds the parameters of no other unit.
        count: how many there are.
        parameters: the parameters of one of them, tied ones once.
    """

    segment: int
    count: int
    parameters: tuple[ParameterSpec, ...]

    @property
    def is_root(self) -> bool:
        """True if it is the root, which stays gathered from the forward to the backward pass."""
        return self.segment < 0


def units_of(plan: Plan, trace: Trace) -> tuple[ShardUnit, ...]:
    """The units of a plan that shards parameters or gradients, the root first, then in forward order.

    Blocks that share a parameter with something outside belong to the root, as fully_shard needs it.
    """
    positions = [
        position
        for position, segment in enumerate(trace.segments)
        if segment.is_block and _is_unit(plan, segment) and not _has_shared_parameters(trace, position)
    ]
    rest = tuple(
        parameter
        for position, segment in enumerate(trace.segments)
        if position not in positions
        for parameter in _untied_specs(segment.parameters) * segment.count
    )
    units = [
        ShardUnit(p, trace.segments[p].count, _untied_specs(trace.segments[p].parameters)) for p in positions
    ]
    return tuple(unit for unit in (ShardUnit(-1, 1, rest), *units) if unit.parameters)


def computed_in(plan: Plan) -> tuple[str, str | None]:
    """Returns the weights' dtype as operators see it, and autocast's."""
    weights = plan.sharding.gather_dtype or plan.precision.parameter_dtype
    return weights, plan.precision.compute_dtype


def cost_of(plan: Plan, segment: Segment) -> SegmentCost:
    """The segment's cost in the precision of the plan, or in the nearest that was traced."""
    weights, autocast = computed_in(plan)
    exact = precision_key(weights, autocast)
    # Weights that are gathered in autocast's dtype cost what weights kept in it do, and a cast more at most.
    keys = (exact, precision_key(weights, None), precision_key("float32", autocast), "float32")
    costs = segment.replaced_costs if plan.replaced and segment.replaced_costs else segment.costs
    for key in (*keys, *costs):
        if key in costs:
            return costs[key]
    raise AssertionError(f"the segment {segment.name} has no costs")


def gathered_bytes(plan: Plan, parameters: Iterable[ParameterSpec]) -> int:
    """Bytes of these parameters as they are gathered, without padding."""
    return sum(
        p.num_elements * DTYPE_BYTES[stored_dtype(plan, p, plan.sharding.gather_dtype)] for p in parameters
    )


def reduced_bytes(plan: Plan, parameters: Iterable[ParameterSpec]) -> int:
    """Bytes of these parameters' gradients as they are reduced, without padding."""
    dtype = plan.sharding.reduce_dtype or plan.sharding.gather_dtype
    return sum(p.num_elements * DTYPE_BYTES[stored_dtype(plan, p, dtype)] for p in parameters if p.trainable)


def stored_dtype(plan: Plan, parameter: ParameterSpec, dtype: str | None) -> str:
    """The dtype of a parameter that the plan may hold in ``dtype``. Integers keep theirs."""
    if parameter.dtype not in _FLOATING:
        return parameter.dtype
    base = plan.precision.parameter_dtype if plan.precision.parameter_dtype != "float32" else parameter.dtype
    return dtype or base


def bucket_sizes(plan: Plan, trace: Trace) -> list[int]:
    """Bytes of each gradient bucket after the first step: as gradients arrive, from the last parameter on."""
    sizes = _gradient_sizes(plan, trace)
    return [
        sum(sizes[index][1] for index in bucket)
        for bucket in gradient_buckets(sizes, plan.sharding.bucket_bytes)
    ]


def reported_bytes(plan: Plan, trace: Trace) -> int:
    """Bytes of the numbers that travel with the last bucket, in its dtype."""
    sizes = _gradient_sizes(plan, trace)
    *_, last = gradient_buckets(sizes, plan.sharding.bucket_bytes) or [[]]  # a model may train nothing
    dtype = sizes[last[-1]][0] if last else "float32"
    return (len(sizes) + NUM_REPORTED) * DTYPE_BYTES[dtype]


def _gradient_sizes(plan: Plan, trace: Trace) -> list[tuple[str, int]]:
    gradients = [
        (stored_dtype(plan, parameter, None), parameter.num_elements) for parameter in _gradient_order(trace)
    ]
    return [(dtype, num * DTYPE_BYTES[dtype]) for dtype, num in gradients]


def _gradient_order(trace: Trace) -> Iterator[ParameterSpec]:
    # Gradients are complete in the order of the backward pass; that of a tied parameter at its first use.
    for segment in reversed(trace.segments):
        specs = [p for p in reversed(segment.parameters) if p.tied_to is None and p.trainable]
        for _ in range(segment.count):
            yield from specs


def _untied_specs(parameters: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    return tuple(parameter for parameter in parameters if parameter.tied_to is None)


def _is_unit(plan: Plan, segment: Segment) -> bool:
    units = plan.sharding.units
    return units is None or any(matches(selector, segment) for selector in units)


def matches(selector: str, segment: Segment) -> bool:
    """Returns whether a selector of modules matches the blocks of a segment."""
    return selector.rpartition(".")[2] == segment.block_class or any(
        fnmatch.fnmatchcase(path, selector) for path in segment.paths
    )


def is_recomputed(plan: Plan, segment: Segment) -> bool:
    """Returns whether recomputation selects the blocks of a segment, all of them or every n-th."""
    is_on, selectors = plan.recomputation.kind != "none", plan.recomputation.selectors
    return (
        is_on
        and segment.is_block
        and (selectors is None or any(matches(selector, segment) for selector in selectors))
    )


def saved_results(plan: Plan, cost: SegmentCost) -> list[ForwardResult]:
    """Returns the results that selective recomputation keeps of a segment; empty under any other plan."""
    again = plan.recomputation
    if again.kind != "selective":
        return []
    return [each for each in cost.results if is_saved(again.saved_operators, each.name, each.number)]


def _has_shared_parameters(trace: Trace, position: int) -> bool:
    segment = trace.segments[position]
    if any(parameter.tied_to is not None for parameter in segment.parameters):  # it borrows one
        return True
    owners = tuple(f"{path}." for path in segment.paths)  # whether it lends one
    return any(
        parameter.tied_to is not None and parameter.tied_to.startswith(owners)
        for other in trace.segments
        for parameter in other.parameters
    )


class AxisUses(tuple[AxisUse, ...]):
    """Distinct uses of axes in a table's plans. They key the memo by identity, as there may be thousands."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @cached_property
    def pipelines(self) -> tuple[PipelineParallelism, ...]:
        """The ways to run a pipeline that there are."""
        return tuple(dict.fromkeys(use.pipeline for use in self))

    @cached_property
    def pipelined(self) -> np.ndarray:
        """Index into :attr:`pipelines` of each."""
        places = {pipeline: index for index, pipeline in enumerate(self.pipelines)}
        return np.asarray([places[use.pipeline] for use in self], dtype=np.int64)

    @cached_property
    def flags(self) -> Mapping[str, np.ndarray]:
        """Flags of each use, by their name in :class:`Sizes`."""
        return {
            "tensor_sequence": np.asarray([use.tensor.sequence for use in self]),
            "asynchronous": np.asarray([use.tensor.asynchronous for use in self]),
            "parallel_loss": np.asarray([use.tensor.parallel_loss for use in self]),
            "is_ring": np.asarray([use.sequence.exchange == "ring" for use in self]),
            "sequence_loss": np.asarray([use.sequence.parallel_loss for use in self]),
        }


def _flag_by_row(name: str) -> cached_property[np.ndarray]:
    return cached_property(lambda sizes: np.asarray(sizes.uses.flags[name][sizes.use]))  # [R]


@dataclass(frozen=True, eq=False)  # a key of the memo by its identity
class Sizes:
    """Sizes of the axes, and passes, of R plans.

    Attributes:
        data, zero, tensor, sequence, expert, pipeline: [R] sizes of the axes.
        micro_batches: [R] micro-batches of a step.
        use: [R] index into ``uses``.
        uses: how the axes are used.
    """

    data: np.ndarray
    zero: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray
    expert: np.ndarray
    pipeline: np.ndarray
    micro_batches: np.ndarray
    use: np.ndarray
    uses: AxisUses

    def __len__(self) -> int:
        return len(self.data)

    def take(self, rows: np.ndarray) -> Sizes:
        """The sizes of the given rows."""
        columns = {name: getattr(self, name)[rows] for name in self.__dataclass_fields__ if name != "uses"}
        return Sizes(uses=self.uses, **columns)

    tensor_sequence = _flag_by_row("tensor_sequence")
    """[R] whether the axis ``tensor`` divides the residual stream too."""
    asynchronous = _flag_by_row("asynchronous")
    """[R] whether exchanges along the axis ``tensor`` go on while the products beside them are computed."""
    parallel_loss = _flag_by_row("parallel_loss")
    """[R] whether logits stay divided over the axis ``tensor`` in the loss."""
    is_ring = _flag_by_row("is_ring")
    """[R] whether keys and values travel around the axis ``sequence``."""
    sequence_loss = _flag_by_row("sequence_loss")
    """[R] whether head and loss are computed on parts of samples."""

    @property
    def pipelines(self) -> tuple[PipelineParallelism, ...]:
        """The ways to run a pipeline that there are."""
        return self.uses.pipelines

    @cached_property
    def pipelined(self) -> np.ndarray:
        """[R] index into :attr:`pipelines`."""
        return np.asarray(self.uses.pipelined[self.use])

    @cached_property
    def divides(self) -> bool:
        """True if any of the plans divides layers, samples or experts."""
        return any(bool((degrees > 1).any()) for degrees in (self.tensor, self.sequence, self.expert))

    @cached_property
    def divides_model(self) -> np.ndarray:
        """[R] whether ranks hold different parts of the model or of a sample."""
        return (self.tensor > 1) | (self.sequence > 1) | (self.expert > 1) | (self.pipeline > 1)

    @property
    def num_data_ranks(self) -> np.ndarray:
        """[R] ranks that see different data."""
        return np.asarray(self.data * self.zero * self.expert)

    @property
    def num_copies(self) -> np.ndarray:
        """[R] ranks that have the same experts."""
        return np.asarray(self.data * self.zero)

    def shards(self, layout: str) -> np.ndarray:
        """[R] ranks that sharded states are divided over, by layout: ``zero`` if there is one, else all that
        see different data (for whole parameters, with the same experts); for rows (``fully_shard``) also
        ``sequence``."""
        data_ranks = self.data if layout == "parameters" else self.data * self.expert
        ranks = np.where(self.zero > 1, self.zero, data_ranks)
        return np.asarray(ranks * self.sequence if layout == "rows" else ranks)

    def num_samples(self, global_batch: int) -> np.ndarray:
        """[R] samples in a micro-batch of one rank."""
        return np.asarray(global_batch / (self.num_data_ranks * self.micro_batches))


@dataclass(frozen=True, eq=False)  # a key of the memo by its identity
class ModelShard:
    """The part of the model that one rank holds, for each of R plans.

    Attributes:
        trace: the trace of the whole model.
        counts: blocks of each segment on the rank: one number for all plans, or [R].
        live: [R] micro-batches whose activations are alive at the worst moment.
        accumulates: [R] whether gradients of earlier micro-batches are there then.
        receives, sends: [R] whether the rank's part begins after, or ends before, a cut of a pipeline.
        recomputed: [R] the share of its blocks that a stage recomputes; NaN without a pipeline.
        known: shares that were computed before, whichever blocks the ranks have.
    """

    trace: Trace
    sizes: Sizes
    counts: tuple[np.ndarray | int, ...]
    live: np.ndarray
    accumulates: np.ndarray
    receives: np.ndarray
    sends: np.ndarray
    recomputed: np.ndarray
    known: dict[Hashable, np.ndarray] = field(default_factory=dict)

    @classmethod
    def whole(cls, trace: Trace, sizes: Sizes) -> ModelShard:
        """The parts in plans without a pipeline: every rank has a part of every block."""
        ones, no = np.ones(len(sizes), dtype=np.int64), np.zeros(len(sizes), dtype=bool)
        counts = tuple(segment.count for segment in trace.segments)
        many = sizes.micro_batches > 1
        return cls(trace, sizes, counts, ones, many, no, no, np.full(len(sizes), np.nan))

    def staged(
        self,
        counts: np.ndarray,
        live: np.ndarray,
        accumulates: np.ndarray,
        *,
        first: np.ndarray,
        last: np.ndarray,
        recomputed: np.ndarray,
    ) -> ModelShard:
        """Returns these parts with [R, S] blocks on each rank."""
        columns = tuple(counts[:, s] for s in range(counts.shape[1]))
        return replace(
            self,
            counts=columns,
            live=live,
            accumulates=accumulates,
            receives=~first,
            sends=~last,
            recomputed=recomputed,
        )

    def recomputed_share(self, plan: Plan) -> np.ndarray | None:
        """[R] the share of its blocks that a rank recomputes; ``None`` where it is every n-th."""
        if plan.recomputation.share is None:
            return None
        (whole,) = RecomputeShare.of(plan.recomputation).of_stages([1])
        return np.where(np.isnan(self.recomputed), whole, self.recomputed)

    @cached_property
    def divides(self) -> bool:
        """True if any of the plans divides the model."""
        return self.is_cut or self.sizes.divides

    @cached_property
    def is_cut(self) -> bool:
        """True if the plans have stages."""
        return any(isinstance(count, np.ndarray) for count in self.counts)

    @cached_property
    def tail(self) -> int:
        """Index of the segment after the last block, if it ends with logits of a vocabulary; else -1."""
        last = len(self.trace.segments) - 1
        segment = self.trace.segments[last]
        has_words = any(
            growth.words for cost in segment.costs.values() for growth in (cost.saved, cost.incoming)
        )
        return last if has_words and not segment.is_block else -1

    def positions(self, s: int) -> np.ndarray | float:
        """[R] ranks that the positions of a sample are divided over in segment ``s``."""
        if self.trace.segments[s].is_block:
            return self.sizes.sequence
        if s != self.tail or not s:
            return 1.0
        # A stage that begins after the last block is handed whole samples.
        return np.where(self.sizes.sequence_loss & self.has(s - 1), self.sizes.sequence, 1)

    def share(self, s: int, layer_share: float, words: float = 0.0) -> np.ndarray | float:
        """Share of a quantity of segment ``s`` that a rank holds, [R].

        Args:
            s: the segment.
            layer_share: share of the quantity that lies between divided layers.
            words: share of it that lies between the head and the loss.
        """
        if not self.sizes.divides:
            return 1.0
        is_block = self.trace.segments[s].is_block
        key = (layer_share, words, is_block)
        if key not in self.known:  # shared by all cuts of a pipeline, on which positions depend
            # Where the residual stream is divided too, all of a block's activations are.
            inside = np.where(self.sizes.tensor_sequence & is_block, 1.0, layer_share)
            inside = inside + self.sizes.parallel_loss * words
            share = 1.0 - inside * (1.0 - 1.0 / self.sizes.tensor)  # a t-th inside, all of the rest
            self.known[key] = share
        return self.known[key] / self.positions(s)

    def of_parameters(self, s: int) -> np.ndarray | float:
        """Share of the elements of one block's own parameters in segment ``s`` that a rank holds, [R]."""
        if not self.sizes.divides:
            return 1.0
        if s not in self.known:
            total, local = 0, np.zeros(len(self.sizes))
            for spec in self.trace.segments[s].parameters:
                if spec.tied_to is None:
                    total += spec.num_elements
                    size = 0 if spec.tensor_dim is None else spec.shape[spec.tensor_dim]
                    divides = (size > 0) & (size % self.sizes.tensor == 0)  # uneven ones stay whole
                    part = spec.num_elements / np.where(divides, self.sizes.tensor, 1)
                    local = local + (part / self.sizes.expert if spec.is_expert else part)
            self.known[s] = local / total if total else np.ones(len(self.sizes))
        return self.known[s]

    def of_gradients(self, s: int) -> np.ndarray | float:
        """[R] bytes of gradients that a block of segment ``s`` makes where an axis divides experts, as a share
        of those of the whole block: a rank's experts alone, the largest twice, as it is scaled to a mean."""
        if not self.sizes.divides:
            return 1.0
        if ("gradients", s) not in self.known:
            specs = [spec for spec in self.trace.segments[s].parameters if spec.trainable]
            experts = [spec.num_elements for spec in specs if spec.is_expert]
            total = max(1, sum(spec.num_elements for spec in specs))
            e = self.sizes.expert
            less = sum(experts) * (1 - 1 / e) - max(experts, default=0) / e * (e > 1)
            self.known["gradients", s] = 1 - less / total
        return self.known["gradients", s]

    def gathered_inputs(self, s: int) -> np.ndarray | float:
        """[R] gathered inputs of divided layers, kept for weights' gradients, in units of segment outputs:
        Megatron's sequence parallelism gathers the residual stream before each group of divided layers."""
        if not self.sizes.tensor_sequence.any():
            return 0.0
        inputs = self.trace.segments[s].num_rows * (1.0 - 1.0 / self.sizes.tensor)
        return np.where(self.sizes.tensor_sequence, inputs, 0.0)

    def has(self, s: int) -> np.ndarray | bool:
        """[R] whether the rank has a block of the segment."""
        count = self.counts[s]
        return count > 0

    def total(self, of: Sequence[np.ndarray | float]) -> np.ndarray | float:
        """Sums ``of`` (a value for a block of each segment) over all blocks of the rank."""
        return sum(value * count for value, count in zip(of, self.counts, strict=True))
