"""Choice of a tensor-parallel plan: the user's, the model's own, or a found one, each tested before use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.profile import ParameterDims
from atorch_ns.sharding.tensor.divisibility import (
    UndividedError,
    check_degree,
    check_heads,
    degrees,
    misfits,
    no_layer_divides,
    parameter_dims,
)
from atorch_ns.sharding.tensor.find import (
    find_tensor_plan,
    group_reasons,
    open_ends,
    plan_from,
    with_vocabulary,
)
from atorch_ns.sharding.tensor.plan import (
    Layout,
    RegionSpec,
    TensorPlan,
    common_parent,
    is_inside,
    model_plan,
)
from atorch_ns.sharding.tensor.regions import candidate_regions, layout_of, regions_in
from atorch_ns.sharding.tensor.selftest import WHOLE_RESULTS, SelfTest, UnitFailure
from atorch_ns.sharding.tensor.sequence import StreamSpec, stream_of
from atorch_ns.sharding.tensor.trace import LayerGraph, Run, trace_layers
from atorch_ns.text import first_few

Source = Literal["auto", "model", "found"]

Undivided = Literal["error", "keep"]

_LARGEST_DEGREE = 64  # the largest degree that a message offers


@dataclass(frozen=True)
class ChosenPlan:
    """A tested plan with all that is needed to apply it.

    Attributes:
        layout: the plan resolved for the model.
        stream: where the sequence is divided; ``None`` where it is not.
        partial: names of whole parameters whose gradients are summed over the tensor group.
        notes: decisions, as sentences for the report.
    """

    plan: TensorPlan
    layout: Layout
    regions: tuple[RegionSpec, ...]
    stream: StreamSpec | None = None
    partial: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())


def choose_plan(
    model: nn.Module,
    degree: int,
    graph: LayerGraph,
    *,
    plan: TensorPlan | None = None,
    source: Source = "auto",
    sequence_dim: int | None = None,
    run_numerics: bool = True,
    device: torch.device | str = "cpu",
    undivided: Undivided = "error",
    vocabulary: bool = True,
    find_parts: bool = False,
) -> ChosenPlan:
    """Chooses the plan to use.

    Args:
        model: the whole model, on any device; not changed.
        degree: the number of ranks that layers are divided over.
        graph: how the model's layers are connected.
        plan: the user's plan; ``None`` without one.
        source: where a plan comes from if the user gives none.
        sequence_dim: the dimension of the sequence, to divide it between divided layers.
        run_numerics: whether the self-test compares numbers, not shapes alone.
        device: the device that computes these numbers.
        undivided: whether attention whose heads the degree does not divide is an error or stays whole.
        vocabulary: whether the vocabulary's embedding and head are divided, where the user gives no plan.
        find_parts: whether the sizes of fused layers are found, where the user's plan fails without them.

    Raises:
        InputError: if the user's plan does not fit or is wrong, or if no layer or not all heads can be
        divided.
    """
    if undivided == "error":
        check_degree(model, degree)
    test = SelfTest(model, graph, degree, device=device, run_numerics=run_numerics)
    notes: list[str] = []
    if plan is not None:
        _check_users(model, plan, degree, graph)
    elif source != "found":
        plan = _own_plan(model, degree, graph, test, notes=notes, must_exist=source == "model")
    users = plan is not None and plan.where == "user"
    if plan is None:
        plan = find_tensor_plan(model, degree, graph, test)
    plan = _with_vocabulary_as_asked(model, plan, is_divided=users or vocabulary)
    layout = plan.resolve(model)
    if not users and undivided == "error":
        check_heads(model, layout, graph, degree)
    # A unit that fails is left whole with all of its kind, until the rest passes. A user's plan is kept,
    # except that sizes of fused layers which it lacks are taken from a found plan, once.
    while True:
        regions = regions_in(graph, layout)
        failure, partial = test.plan(layout, regions)
        if failure is not None and users and find_parts:
            plan, find_parts = _with_parts(model, plan, find_tensor_plan(model, degree, graph, test)), False
            layout = plan.resolve(model)
            continue
        if failure is None or users:
            break
        plan = _drop_failed_unit(model, plan, layout, failure, degree=degree)
        layout = plan.resolve(model)
    plan = replace(plan, left=group_reasons(plan.left))
    if not layout.layers:
        raise _nothing_divided(model, degree, plan, graph)
    if failure is not None:
        raise _make_plan_error(model, degree, graph, test, plan=plan, failure=failure)
    stream = None
    if sequence_dim is not None:
        stream, partial = _choose_stream(model, test, graph, layout, regions=regions, dim=sequence_dim)
        regions = [_with_uses_of_input(spec, graph, sequence_dim) for spec in regions]
    partial |= _partial_by_flow(graph, regions)
    _check_partial(graph, partial, stream)
    return ChosenPlan(plan, layout, tuple(regions), stream, frozenset(partial), tuple(notes))


def find_dims(model: nn.Module, batch: Any, run: Run, *, run_numerics: bool = False) -> ParameterDims:
    """The parameters that a found plan divides. Used for cost estimates, and valid for any degree.

    Args:
        model, batch, run: as for :func:`trace_layers`.
        run_numerics: whether numbers decide too, as in training, not shapes alone.

    Raises:
        InputError: if training refuses the plan.
        Exception: the model's error, as :func:`trace_layers`.
    """
    graph = trace_layers(model, batch, run)
    # The smallest degree stands for all, since what divides by a multiple of it divides by it too.
    degree = next((n for n in degrees(model) if n > 1), 2)
    try:
        plan = choose_plan(model, degree, graph, source="found", run_numerics=run_numerics, undivided="keep")
    except UndividedError:
        return ParameterDims()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dims: dict[str, int] = {}
    ends: set[str] = set()
    for path, layer in plan.layout.layers.items():
        module = model.get_submodule(path)
        parameters = dict(module.named_parameters())
        for name, (dim, _) in parameter_dims(module, layer).items():
            if name in parameters:  # not a bias that the layer lacks
                first = names[id(parameters[name])]
                dims[first] = dim
                ends |= {first} if layer.style in WHOLE_RESULTS else set()
    return ParameterDims(dims, frozenset(ends))


def _own_plan(
    model: nn.Module, degree: int, graph: LayerGraph, test: SelfTest, *, notes: list[str], must_exist: bool
) -> TensorPlan | None:
    plan, why = _tested_own_plan(model, degree, graph, test)
    notes += [why] if why else []
    if plan is None and must_exist:
        raise InputError(
            f"source='model', but {type(model).__name__} has no usable plan{': ' + why if why else ''}. Use "
            "source='auto' to find one."
        )
    return plan


def _tested_own_plan(
    model: nn.Module, degree: int, graph: LayerGraph, test: SelfTest
) -> tuple[TensorPlan | None, str]:
    plan = model_plan(model)
    if plan is None:
        return None, ""
    layout = plan.resolve(model)
    unfit = misfits(model, layout, degree)
    # A head or an embedding that does not divide, or is tied to one that stays whole, can be left out.
    layers = {
        path: layer
        for path, layer in layout.layers.items()
        if path not in unfit or layer.style not in WHOLE_RESULTS
    }
    layout = with_vocabulary(model, replace(layout, layers=layers), degree, graph)
    reasons = list(misfits(model, layout, degree).items())
    if not reasons:
        failure, _ = test.plan(layout, regions_in(graph, layout))
        reasons = [] if failure is None else [(failure.path, failure.reason)]
    if reasons:
        path, why = reasons[0]
        return None, f"the model's own plan is not used: {path}: {why}"
    whole = {path: "the model's plan leaves it whole" for path in graph.nodes if path not in layout.layers}
    return replace(plan_from(model, layout, left=whole), where="model"), ""


def _with_vocabulary_as_asked(model: nn.Module, plan: TensorPlan, *, is_divided: bool) -> TensorPlan:
    if is_divided:
        return plan
    layout = plan.resolve(model)
    ends = {p for p, layer in layout.layers.items() if layer.style in WHOLE_RESULTS}
    inner = replace(layout, layers={path: layer for path, layer in layout.layers.items() if path not in ends})
    whole = {**plan.left, **dict.fromkeys(sorted(ends), "vocabulary=False")}
    return replace(plan_from(model, inner, left=whole), where=plan.where)


def _with_parts(model: nn.Module, plan: TensorPlan, source: TensorPlan) -> TensorPlan:
    mine, other = plan.resolve(model).layers, source.resolve(model).layers
    parts = {path: layer.parts for path, layer in other.items() if layer.parts and path in mine}
    return replace(plan, parts={**parts, **plan.parts})  # sizes that the user gives come first


def _degrees_by_size(model: nn.Module, graph: LayerGraph) -> list[int]:
    # Sizes alone: heads are not looked at here.
    layouts = [layout_of(spec) for spec in candidate_regions(graph)]
    return [
        n for n in range(2, _LARGEST_DEGREE + 1) if any(not misfits(model, layout, n) for layout in layouts)
    ]


def _check_users(model: nn.Module, plan: TensorPlan, degree: int, graph: LayerGraph) -> None:
    missing = plan.unmatched(model)
    if missing:
        raise InputError(
            f"the plan of tensor_parallel names {', '.join(missing)}, which matches nothing in "
            f"{type(model).__name__}. Name layers by path with *, such as "
            f"{', '.join([path for path, m in model.named_modules() if path and not list(m.children())][:6])}, "
            "and attributes by path too."
        )
    unfit = misfits(model, plan.resolve(model), degree)
    if unfit:
        lines = first_few([f"{path}: {why}" for path, why in unfit.items()], 6, "; ")
        works = ", ".join(map(str, degrees(model) or _degrees_by_size(model, graph)))
        raise InputError(
            f"the plan of tensor_parallel does not fit tensor={degree}: {lines}. Degrees that divide the model: "
            f"{works or 'none'}; or set these layers to replicate."
        )


def _nothing_divided(model: nn.Module, degree: int, plan: TensorPlan, graph: LayerGraph) -> InputError:
    if plan.where == "user":
        return InputError(
            f"the plan of tensor_parallel divides no layer of {type(model).__name__}: all that it names is replicate or "
            "sequence, which stay whole. Make pairs of layers colwise and rowwise, or leave the plan out to have one "
            "found."
        )
    works = _degrees_by_size(model, graph)
    # If this degree divides the sizes of a region, the obstacle lies elsewhere and stops other degrees too.
    return no_layer_divides(model, degree, plan.left, [] if degree in works else works)


def _make_plan_error(
    model: nn.Module,
    degree: int,
    graph: LayerGraph,
    test: SelfTest,
    *,
    plan: TensorPlan,
    failure: UnitFailure,
) -> InputError:
    # A plan that passes shows what the user's plan lacks there.
    valid_plan = find_tensor_plan(model, degree, graph, test)
    right = valid_plan.resolve(model)  # may leave the unit whole
    mine = plan.resolve(model)
    local = right.filtered(lambda path: is_inside(path, failure.path))
    advice = (
        "Give the attributes that its code divides by, or the sizes of fused parts, or set it to replicate."
    )
    if local.layers:
        advice = f"This plan passes: {valid_plan.as_config()}."
    missing = [name for name in local.attributes if name not in mine.attributes]
    inputs = [name for name in local.narrow_inputs if name not in mine.narrow_inputs]
    parts = [path for path, layer in local.layers.items() if layer.parts]
    ends = open_ends(mine, graph)  # the likeliest cause comes first
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


def _drop_failed_unit(
    model: nn.Module, plan: TensorPlan, layout: Layout, failure: UnitFailure, *, degree: int
) -> TensorPlan:

    def has_failed(path: str) -> bool:
        return any(is_inside(path, unit) for unit in failure.alike)

    why = f"each of its unit's layers passes the test alone, and together {failure.reason}"
    unfit = {path: why for path in layout.layers if has_failed(path)}
    # Layers that share a weight with one that stays whole do not fit any more: they stay whole too.
    while unfit.keys() & layout.layers.keys():
        layout = layout.filtered(lambda path: path not in unfit and not has_failed(path))
        unfit.update(misfits(model, layout, degree))
    return replace(plan_from(model, layout, left={**plan.left, **unfit}), where=plan.where)


def _partial_by_flow(graph: LayerGraph, regions: Iterable[RegionSpec]) -> set[str]:
    # Whole parameters that meet results of columns: the gradient of each rank covers its own features only.
    columns = {path for spec in regions for path in spec.columns}
    return {name for name, sources in graph.met.items() if sources & columns}


def _choose_stream(
    model: nn.Module,
    test: SelfTest,
    graph: LayerGraph,
    layout: Layout,
    *,
    regions: Sequence[RegionSpec],
    dim: int,
) -> tuple[StreamSpec, set[str]]:
    # Hidden states are in pieces only inside a chain of blocks that hand them on untouched: code between two
    # chains, such as a mean over the sequence or a learned scale, sees them whole.
    chains = _find_block_chains(graph, regions, dim)
    failure = UnitFailure("", "it repeats no block whose layers are all divided")  # if there are no chains
    leaks = [(path, why) for chain in chains for path in chain if (why := graph.blocks.kept.get(path))]
    if leaks:
        path, why = leaks[0]
        raise InputError(
            f"sequence=True cannot be used with {type(model).__name__}: {path} would see a piece of the sequence, "
            f"but its hidden states are used other than through its output: {why}. Return what other code needs, or set "
            "sequence=False."
        )
    # Gradients are summed at the gathers first, then at each column: that is right for any code before it.
    for tight in (True, False):
        if not chains:
            break
        stream = StreamSpec(tuple(chains), dim=dim, tight=tight)
        problem, partial = test.plan(layout, regions, stream)
        if problem is None:
            return stream, partial
        failure = problem
    advice = "" if "sequence=False" in failure.reason else " Set sequence=False."
    raise InputError(
        f"sequence=True cannot be used with {type(model).__name__}: with the sequence divided, "
        f"{failure.path or 'the model'} does not give the same result: {failure.reason.rstrip('.')}.{advice}"
    )


def _with_uses_of_input(spec: RegionSpec, graph: LayerGraph, dim: int) -> RegionSpec:
    home = common_parent(spec.columns)
    streams = {path: stream_of(call.args, call.kwargs, dim) for path, call in graph.calls.items()}
    stream = streams.get(home)
    # The very tensor that the module is called with must reach all columns, with no norm between.
    if stream is None or any(streams.get(path) is not stream for path in spec.columns):
        return replace(spec, one_input=False, one_use=False)
    others = (path for path in streams if path.startswith(f"{home}.") and path not in spec.columns)
    read = graph.reads_in_code(stream) or any(streams[path] is stream for path in others)
    return replace(spec, one_input=True, one_use=not read)


def _check_partial(graph: LayerGraph, partial: Iterable[str], stream: StreamSpec | None) -> None:
    # Each rank has a summand of a partial gradient, but the whole gradient from code outside the blocks.
    # Neither a sum nor a mean over ranks is right for both.
    for name in sorted(partial):
        users = graph.blocks.users.get(name, set())
        inside = {path for path in users if (stream.holds(path) if stream is not None and path else path)}
        outside = sorted(users - inside)
        if not inside or not outside:
            continue
        advice = "Set sequence=False, or use" if stream is not None else "Use"
        raise InputError(
            f"tensor_parallel cannot sum the gradient of {name} over ranks: in {min(inside)} each rank computes a "
            f"part of it, but {outside[0] or 'code outside the blocks'} also uses it, and there each rank computes all "
            f"of it. {advice} a separate parameter there."
        )


def _find_block_chains(graph: LayerGraph, regions: Iterable[RegionSpec], dim: int) -> list[tuple[str, ...]]:
    specs = list(regions)
    chains: list[list[str]] = []
    for paths in graph.blocks.chains:
        before = None
        for path in paths:
            holds = any(is_inside(spec.rows[0], path) for spec in specs)
            if not holds or any(spec.crosses(path) for spec in specs):
                before = None
            # Its stream is the first output of the block before: one chain.
            elif before is not None and _hands_on(graph, before, path, dim):
                chains[-1].append(path)
                before = path
            else:
                chains.append([path])
                before = path
    return [tuple(chain) for chain in chains]


def _hands_on(graph: LayerGraph, before: str, path: str, dim: int) -> bool:
    call = graph.calls[path]
    stream = stream_of(call.args, call.kwargs, dim)
    siblings = before.rpartition(".")[0] == path.rpartition(".")[0]
    return siblings and stream is not None and stream is graph.blocks.results.get(before)
