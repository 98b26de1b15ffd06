"""Choosing a plan: the user's, the model's own, or a found one; each tested before use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.sharding._tensor_apply import RegionSpec
from atorch_ns.sharding._tensor_check import Failure, PlanTest
from atorch_ns.sharding._tensor_degree import check_degree, degrees, no_layer_divides
from atorch_ns.sharding._tensor_find import find_tensor_plan, plan_from, with_vocabulary
from atorch_ns.sharding._tensor_heads import check_heads
from atorch_ns.sharding._tensor_misfits import misfits
from atorch_ns.sharding._tensor_model_plan import model_plan
from atorch_ns.sharding._tensor_plan import Layout, TensorPlan
from atorch_ns.sharding._tensor_reasons import grouped, open_ends
from atorch_ns.sharding._tensor_region import Division
from atorch_ns.sharding._tensor_regions import candidate_regions, layout_of, regions_in
from atorch_ns.sharding._tensor_sequence import StreamSpec
from atorch_ns.sharding._tensor_stream import check_partial, choose_stream
from atorch_ns.sharding._tensor_trace import LayerGraph

__all__ = ["ChosenPlan", "choose_plan"]

Source = Literal["auto", "model", "found"]

Undivided = Literal["error", "keep"]

_LARGEST_DEGREE = 64
"""Of those that a message offers."""


@dataclass(frozen=True)
class ChosenPlan:
    """A plan with all that is needed to use it.

    Attributes:
        plan: the plan.
        layout: what it means for the model.
        regions: the stretches between its layers.
        stream: where the sequence is divided; ``None`` where it is not.
        partial: names of whole parameters whose gradients are summed over the tensor group.
        notes: what was decided, as sentences for the report.
    """

    plan: TensorPlan
    layout: Layout
    regions: tuple[RegionSpec, ...]
    stream: StreamSpec | None = None
    partial: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())


def choose_plan(
    model: nn.Module,
    division: Division,
    graph: LayerGraph,
    *,
    plan: TensorPlan | None = None,
    source: Source = "auto",
    sequence_dim: int | None = None,
    really: bool = True,
    undivided: Undivided = "error",
) -> ChosenPlan:
    """The plan to use; collective where it is ``really`` tested.

    Args:
        model: whole, on any device; not changed.
        division: this rank's place.
        graph: how the model's layers are connected.
        plan: the user's.
        source: where a plan comes from if the user gives none.
        sequence_dim: the dimension of the sequence, to divide it between divided layers.
        really: whether to compute in the self-tests, and not go by shapes alone.
        undivided: what becomes of attention whose heads the degree does not divide: an error, or it is kept whole.

    Raises:
        InputError: if the user's plan does not fit or computes something else, or nothing can be divided, or heads
            cannot.
    """
    if undivided == "error":
        check_degree(model, division.degree)
    test = PlanTest(model, graph, division, really=really)
    notes: list[str] = []
    if plan is not None:
        _check_users(model, plan, division.degree, graph)
    elif source != "found":
        plan = _own_plan(model, division.degree, graph, test, notes)
        if plan is None and source == "model":
            raise InputError(
                f"source='model', and {type(model).__name__} has no plan that can be used"
                f"{': ' + notes[0] if notes else ''}. Use source='auto' to have one found."
            )
    users = plan is not None and plan.where == "user"
    if plan is None:
        plan = find_tensor_plan(model, division.degree, graph, accept=test.region)
    layout = plan.resolve(model)
    if not users and undivided == "error":
        check_heads(model, layout, graph, division.degree)
    regions = regions_in(graph, layout)
    failure, partial = test.whole(layout, regions)
    while failure is not None and not users:
        plan = _without(model, plan, layout, failure, division.degree)
        layout = plan.resolve(model)
        regions = regions_in(graph, layout)
        failure, partial = test.whole(layout, regions)
    plan = replace(plan, left=grouped(plan.left))
    if not layout.layers:
        raise _all_whole(model) if users else _nothing(model, division.degree, plan, graph)
    if failure is not None:
        raise _failed(model, division, graph, test, plan, failure)
    stream = None
    if sequence_dim is not None:
        stream, partial = choose_stream(model, test, graph, layout, regions, sequence_dim)
    partial |= _partial_by_flow(graph, regions)
    check_partial(graph, partial, stream)
    return ChosenPlan(plan, layout, tuple(regions), stream, frozenset(partial), tuple(notes))


def _own_plan(
    model: nn.Module, degree: int, graph: LayerGraph, test: PlanTest, notes: list[str]
) -> TensorPlan | None:
    """The model's own plan, completed by its vocabulary, if it passes the test."""
    plan = model_plan(model)
    if plan is None:
        return None
    layout = plan.resolve(model)
    apart = misfits(model, layout, degree)
    # A head or an embedding that does not divide, or is tied to one that the plan leaves whole, can be left out.
    kept = {
        path: layer
        for path, layer in layout.layers.items()
        if path not in apart or layer.style not in ("colwise_gather_output", "embedding_rowwise")
    }
    layout = with_vocabulary(model, replace(layout, layers=kept), degree, graph)
    apart = misfits(model, layout, degree)
    failure = None
    if not apart:
        failure, _ = test.whole(layout, regions_in(graph, layout))
    if apart or failure is not None:
        path, why = next(iter(apart.items())) if apart else (failure.path, failure.reason)  # type: ignore[union-attr]
        notes.append(f"the model's own plan is not used: {path}: {why}")
        return None
    left = {path: "the model's plan leaves it whole" for path in graph.nodes if path not in layout.layers}
    return replace(plan_from(model, layout, left=left), where="model")


def _degrees_by_size(model: nn.Module, graph: LayerGraph) -> list[int]:
    """Degrees that divide the sizes of some pair of layers."""
    pairs = [layout_of(spec) for spec in candidate_regions(graph)]
    return [n for n in range(2, _LARGEST_DEGREE + 1) if any(not misfits(model, pair, n) for pair in pairs)]


def _check_users(model: nn.Module, plan: TensorPlan, degree: int, graph: LayerGraph) -> None:
    """Refuses patterns that match nothing and layers that cannot be divided."""
    missing = plan.unmatched(model)
    if missing:
        raise InputError(
            f"the plan of tensor_parallel names {', '.join(missing)}, which matches nothing in "
            f"{type(model).__name__}. Layers are named by path with *, as "
            f"{', '.join([path for path, m in model.named_modules() if path and not list(m.children())][:6])}, "
            "attributes by path too."
        )
    apart = misfits(model, plan.resolve(model), degree)
    if apart:
        lines = "; ".join(f"{path}: {why}" for path, why in list(apart.items())[:6])
        works = ", ".join(map(str, degrees(model) or _degrees_by_size(model, graph)))
        raise InputError(
            f"the plan of tensor_parallel does not fit tensor={degree}: {lines}. Degrees that divide the model: "
            f"{works or 'none'}; or set these layers to replicate."
        )


def _all_whole(model: nn.Module) -> InputError:
    return InputError(
        f"the plan of tensor_parallel divides no layer of {type(model).__name__}: all that it names is replicate or "
        "sequence, which stay whole. Make pairs of layers colwise and rowwise, or leave the plan out to have one "
        "found."
    )


def _nothing(model: nn.Module, degree: int, plan: TensorPlan, graph: LayerGraph) -> InputError:
    works = [n for n in _degrees_by_size(model, graph) if n != degree]
    return no_layer_divides(model, degree, plan.left, works)


def _failed(
    model: nn.Module,
    division: Division,
    graph: LayerGraph,
    test: PlanTest,
    plan: TensorPlan,
    failure: Failure,
) -> InputError:
    """The error for a user's plan, with the settings that would work where some are found."""
    found = find_tensor_plan(model, division.degree, graph, accept=test.region)
    right = found.resolve(model)
    mine = plan.resolve(model)
    advice = (
        "Give the attributes that its code divides by, or the sizes of fused parts, or set it to replicate."
    )
    if any(_inside(path, failure.path) for path in right.layers):
        advice = f"This plan passes: {found.as_config()}."
    missing = [
        name for name in right.attributes if _inside(name, failure.path) and name not in mine.attributes
    ]
    inputs = [
        name for name in right.narrow_inputs if _inside(name, failure.path) and name not in mine.narrow_inputs
    ]
    parts = [path for path, layer in right.layers.items() if layer.parts and _inside(path, failure.path)]
    ends = open_ends(mine, graph)
    if ends:
        advice = f"{ends}. {advice}"
    elif missing:
        advice = f"The plan lacks attributes: {', '.join(missing)}. {advice}"
    elif inputs:
        advice = f"The plan lacks narrow_inputs: {', '.join(inputs)}. {advice}"
    elif any(path in mine.layers and mine.layers[path].parts is None for path in parts):
        advice = f"The plan lacks parts of fused layers: {', '.join(parts)}. {advice}"
    return InputError(
        f"the plan of tensor_parallel makes {failure.path or type(model).__name__} compute something else than "
        f"it does whole: {failure.reason}. {advice}"
    )


def _without(model: nn.Module, plan: TensorPlan, layout: Layout, failure: Failure, degree: int) -> TensorPlan:
    """The plan with the failed unit, and those like it, whole; what shares weights with their layers too."""
    apart = {
        path: f"each of its unit's layers passes the test alone, and together {failure.reason}"
        for path in layout.layers
        if any(_inside(path, unit) for unit in failure.alike)
    }
    while apart.keys() & layout.layers.keys():
        layout = Layout(
            {path: layer for path, layer in layout.layers.items() if path not in apart},
            *(
                tuple(name for name in names if not any(_inside(name, unit) for unit in failure.alike))
                for names in (layout.attributes, layout.narrow_inputs)
            ),
        )
        apart |= misfits(model, layout, degree)
    return replace(plan_from(model, layout, left={**plan.left, **apart}), where=plan.where)


def _inside(path: str, parent: str) -> bool:
    return not parent or path.startswith(f"{parent}.")


def _partial_by_flow(graph: LayerGraph, regions: Iterable[RegionSpec]) -> set[str]:
    """Whole parameters that meet results of columns: each rank's gradient covers its own features."""
    columns = {path for spec in regions for path in spec.columns}
    return {name for name, sources in graph.met.items() if sources & columns}
