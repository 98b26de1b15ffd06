"""Self-test of tensor parallelism: modules must compute divided by a layout what they compute whole.

A unit's divided copy must run without memory and give the right shapes. Then both copies run on random
values; all outputs and gradients are compared. The divided copy runs on simulated ranks in this process.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.capture.nests import map_tensors, unique_tensors_of
from atorch_ns.profile.record.steps import ModuleCall
from atorch_ns.sharding.collectives import SimulatedGroup, simulate
from atorch_ns.sharding.compare import (
    InFloat32,
    copy_to_run,
    gradient_floor,
    largest,
    relative_error,
    weighted_sum,
)
from atorch_ns.sharding.rank_context import TensorGroup
from atorch_ns.sharding.tensor.apply import Divided, divide
from atorch_ns.sharding.tensor.plan import Layout, RegionSpec, common_parent, integers, is_inside
from atorch_ns.sharding.tensor.sequence import StreamSpec
from atorch_ns.sharding.tensor.trace import LayerGraph
from atorch_ns.sharding.tensor.unit import TestedUnit, unit_for
from atorch_ns.text import error_line

TOLERANCE = 1e-3
"""The largest error that counts as rounding, in units of the largest value of the tensor compared. In fp32 a
right layout shows about 1e-6; a head too few or a wrong order of parts shows about 1."""

WHOLE_RESULTS = ("embedding_rowwise", "colwise_gather_output")
"""Styles whose results are whole: such a layer is right whatever stands around it."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a unit's test.

    Attributes:
        reason: why the unit fails, as a clause; empty if it passes.
        runs: whether the divided unit runs and gives results of the right shapes.
        whole_runs: whether the undivided one runs.
        reads: paths of the numbers that the divided one has read: others make no difference.
        error: the largest error of an output or a gradient, relative to the largest value there.
        partial: names of whole parameters of which each rank has only a summand of the gradient.
    """

    reason: str = ""
    runs: bool = True
    whole_runs: bool = True
    reads: frozenset[str] = frozenset()
    error: float = 0.0
    partial: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the unit computes divided what it computes whole."""
        return not self.reason


@dataclass(frozen=True)
class UnitFailure:
    """A unit that computes a different result when it is divided.

    Attributes:
        path: the unit's path.
        reason: the evidence, as a clause.
        alike: the paths of all units of its kind, its own included.
    """

    path: str
    reason: str
    alike: tuple[str, ...] = ()


class SelfTest:
    """Tests layouts of one model for one number of ranks.

    Args:
        model: the whole model; not changed.
        degree: the number of ranks that share its layers.
        device: where numbers are computed.
        run_numerics: whether to compare numbers; else shapes alone, which a wrong order of heads passes.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        degree: int,
        *,
        device: torch.device | str = "cpu",
        run_numerics: bool = True,
    ) -> None:
        self._model = model
        self._graph = graph
        self._degree = degree
        self._device = torch.device(device)
        self._run_numerics = run_numerics
        self._shapes: dict[str, list[torch.Size]] = {}  # of whole results, by path of the unit

    def unit(
        self,
        path: str,
        layout: Layout,
        regions: Iterable[RegionSpec],
        stream: StreamSpec | None = None,
        *,
        training: bool = False,
        may_read_values: bool = False,
    ) -> Verdict:
        """Tests the innermost called module at or around ``path``.

        Args:
            path: path of a module; empty for the model.
            layout: layout of the model; entries outside the unit are ignored.
            regions: regions of the model; those outside the unit are ignored.
            stream: blocks of the unit between which the sequence is divided.
            training: whether it must run in training as well as in evaluation.
            may_read_values: whether numbers alone decide where undivided code fails on fake tensors too, as a
                router's does, which looks at values.
        """
        unit = unit_for(self._model, self._graph, path)
        local = layout.within(unit.path)
        # Without random numbers of each rank's own: results must be equal.
        specs = [
            replace(spec.within(unit.path), random=False)
            for spec in regions
            if is_inside(spec.rows[0], unit.path)
        ]
        # Shapes first: they cost no memory, and most wrong layouts fail there.
        shapes = _run_without_memory(
            unit,
            local,
            specs,
            self._degree,
            stream=stream,
            training=training,
            whole_sizes=self._shapes.get(unit.path),
        )
        if shapes.whole_runs:
            self._shapes[unit.path] = shapes.wanted
        reads = frozenset(".".join(filter(None, (unit.path, name))) for name in shapes.reads)
        if shapes.reason and (shapes.whole_runs or not may_read_values):
            return Verdict(shapes.reason, runs=False, whole_runs=shapes.whole_runs, reads=reads)
        if not self._run_numerics:
            return Verdict(reads=reads)
        try:
            return replace(
                _compare_runs(unit, local, specs, stream, degree=self._degree, device=self._device),
                reads=reads,
            )
        except Exception as error:
            if not shapes.reason:
                raise
            return Verdict(f"it fails with {error_line(error)}", runs=False, whole_runs=False, reads=reads)

    def plan(
        self, layout: Layout, regions: Iterable[RegionSpec], stream: StreamSpec | None = None
    ) -> tuple[UnitFailure | None, set[str]]:
        """Tests distinct units: the first failure, if any, and whole parameters with partial gradients."""
        specs = list(regions)
        partial: set[str] = set()
        for alike in self._group_test_paths(layout, specs, calls=stream is not None):
            path = alike[0]
            inside = stream is not None and stream.holds(path)
            # As the unit sees it: one block, which is the unit itself.
            its_stream = replace(stream, chains=(("",),)) if stream is not None and inside else None
            verdict = self.unit(path, layout, specs, its_stream, may_read_values=True)
            if not verdict.passed:
                return UnitFailure(path, verdict.reason, alike), partial
            partial |= {".".join(filter(None, (each, name))) for each in alike for name in verdict.partial}
        return None, partial

    def _group_test_paths(
        self, layout: Layout, regions: Iterable[RegionSpec], *, calls: bool
    ) -> list[tuple[str, ...]]:
        # Blocks of one kind are tested once.
        layers = [path for path, layer in layout.layers.items() if layer.style not in WHOLE_RESULTS]
        groups: dict[object, list[str]] = {}
        in_blocks: set[str] = set()
        for block in repeated_blocks(self._model):
            mine = [path for path in layers if path.startswith(f"{block.name}.")]
            if not mine or block.name not in self._graph.calls:
                continue
            if any(spec.crosses(block.name) for spec in regions):  # tested below, with other blocks
                continue
            in_blocks |= set(mine)
            inner = layout.within(block.name)
            shapes = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
            # With other arguments a block is another kind: the first one may get one tensor twice.
            signature = _argument_signature(self._graph.calls[block.name]) if calls else ()
            numbers = (inner.attributes, inner.narrow_inputs)
            key = (type(block.module), tuple(inner.layers.items()), numbers, shapes, signature)
            groups.setdefault(key, []).append(block.name)
        places = [tuple(paths) for paths in groups.values()]
        # Layers of no block, and of regions over several blocks: tested in the module that holds them all.
        rest = [path for path in layers if path not in in_blocks]
        if rest:
            places.append((unit_for(self._model, self._graph, common_parent(rest)).path,))
        return places


@dataclass
class _Shapes:
    reason: str = ""  # why the divided unit does not run or gives other shapes; empty if it is right
    whole_runs: bool = False  # whether the undivided one runs
    wanted: list[torch.Size] = field(default_factory=list)  # shapes of the undivided one's results
    reads: set[str] = field(default_factory=set)  # names of the numbers that the divided one has read


def _run_without_memory(
    unit: TestedUnit,
    layout: Layout,
    regions: Iterable[RegionSpec],
    degree: int,
    *,
    stream: StreamSpec | None,
    training: bool,
    whole_sizes: list[torch.Size] | None,
) -> _Shapes:
    shapes = _Shapes()
    try:
        with unit.without_memory() as (module, args, kwargs):
            if whole_sizes is None:  # its shapes are not known from an earlier layout
                whole_sizes = [tensor.shape for tensor in unit.results(module(*args, **kwargs))]
            shapes.whole_runs, shapes.wanted = True, whole_sizes
            divide(module, layout, TensorGroup(degree), regions, stream=stream)
            _note_reads(module, shapes.reads)
            sizes = [tensor.shape for tensor in unit.results(module(*args, **kwargs))]
            if training:
                module.train()(*args, **kwargs)  # only whether it runs
    except Exception as error:  # whatever its code raises
        shapes.reason = f"it fails with {error_line(error)}"
    else:
        shapes.reason = "" if whole_sizes == sizes else f"it gives {sizes} in place of {whole_sizes}"
    return shapes


class _Noting:
    """First base of a class whose objects tell which attributes are read."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Skips the other base's handling of its subclasses."""


def _note_reads(module: nn.Module, names: set[str]) -> None:
    prefixes: dict[int, list[str]] = {}  # paths by id: several modules may hold one settings object
    owners: dict[int, Any] = {}  # keeps the ids valid
    for path, part in module.named_modules(remove_duplicate=False):
        for name, _, _ in integers(part):
            inner = name.rpartition(".")[0]
            owner = getattr(part, inner) if inner else part
            owners[id(owner)] = owner
            prefixes.setdefault(id(owner), []).append(".".join(filter(None, (path, inner))))
    for key, owner in owners.items():
        paths = list(dict.fromkeys(prefixes[key]))
        try:
            owner.__class__ = _make_noting_class(type(owner), paths, names)
        except TypeError:  # its class has another layout of memory: all of it may be read
            names.update(".".join(filter(None, (prefix, name))) for prefix in paths for name in vars(owner))


def _make_noting_class(kind: type, prefixes: Sequence[str], names: set[str]) -> type:
    def read(self: Any, name: str) -> Any:
        value = super(_Noting, self).__getattribute__(name)  # that of ``kind``
        if type(value) is int:
            attrs = object.__getattribute__(self, "__dict__")
            # A class may read it by another name of its own.
            aliases = [name] if name in attrs else [alias for alias, other in attrs.items() if other is value]
            names.update(".".join(filter(None, (prefix, alias))) for prefix in prefixes for alias in aliases)
        return value

    namespace = {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (_Noting, kind), {}, lambda attrs: attrs.update(namespace))


def _compare_runs(
    unit: TestedUnit,
    layout: Layout,
    regions: Sequence[RegionSpec],
    stream: StreamSpec | None,
    *,
    degree: int,
    device: torch.device,
) -> Verdict:
    module, args, kwargs = unit.with_values(device)

    def run(group: SimulatedGroup) -> tuple[_Run, Divided]:
        copy = copy_to_run(module)
        record = divide(copy, layout, TensorGroup(group), regions, stream=stream)
        return _run_unit(unit, copy, args, kwargs), record

    # All copies share the memory of the weights; gradients are their own.
    reference = _run_unit(unit, copy_to_run(module), args, kwargs)
    runs, (record, *_) = zip(*simulate(degree, run, device), strict=True)
    floor = gradient_floor(reference.inputs)
    errors = {
        f"output {index}": max(relative_error(mine, whole) for mine in ranks)
        for index, (whole, *ranks) in enumerate(_by_rank(reference, runs, lambda run: run.outputs))
    }
    errors |= {
        f"the gradient of input {index}": max(relative_error(mine, whole, floor=floor) for mine in ranks)
        for index, (whole, *ranks) in enumerate(_by_rank(reference, runs, lambda run: run.inputs))
    }
    partial = _compare_parameters(runs, reference, record, errors)
    where = max(errors, key=errors.__getitem__, default="")
    error = errors.get(where, 0.0)
    reason = "" if error <= TOLERANCE else f"{where} is off by {error:.2g} of its size"
    return Verdict(reason, error=error, partial=partial)


@dataclass(frozen=True)
class _Run:
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]


def _by_rank(
    reference: _Run, runs: Sequence[_Run], tensors: Callable[[_Run], list[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(tensors(reference), *map(tensors, runs), strict=True)  # the whole one, then each rank's


def _run_unit(unit: TestedUnit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    inputs: list[torch.Tensor] = []
    clones: dict[int, torch.Tensor] = {}

    def make_clone(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in clones:  # a tensor that is passed twice stays one
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            if leaf.requires_grad:  # as in the model: masks and rotary tables get no gradients
                inputs.append(leaf)
            clones[id(tensor)] = leaf.clone()  # operators in place may not change a leaf
        return clones[id(tensor)]

    with torch.enable_grad(), InFloat32():
        args, kwargs = map_tensors(make_clone, args), map_tensors(make_clone, kwargs)
        outputs = [tensor for tensor in unit.results(module(*args, **kwargs)) if tensor.is_floating_point()]
        loss = weighted_sum(outputs, seed=11)
        if loss is not None and loss.requires_grad:
            loss.backward()
    return _Run(
        [output.detach() for output in outputs],
        [_dense_gradient(tensor) for tensor in inputs],
        {name: _dense_gradient(parameter) for name, parameter in module.named_parameters()},
    )


def _dense_gradient(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        return torch.zeros_like(tensor.detach())
    return tensor.grad.detach().to_dense()  # of a sparse table too


def _compare_parameters(
    runs: Sequence[_Run], reference: _Run, record: Divided, errors: dict[str, float]
) -> tuple[str, ...]:
    partial = []
    least = gradient_floor(reference.parameters.values())
    for name, whole in reference.parameters.items():
        ranks, what = [run.parameters[name] for run in runs], f"the gradient of {name}"
        if name in record.dims:  # divided: each rank has the gradient of its part
            target = record.packings[name].pack(whole) if name in record.packings else whole  # by rank
            pairs = zip(ranks, target.chunk(len(ranks), record.dims[name]), strict=True)
            floor = max(least, largest(whole))
            errors[what] = max(relative_error(mine, part, floor=floor) for mine, part in pairs)
            continue
        # Each rank has a whole parameter's gradient, or a summand of it: the smaller error tells.
        total = torch.stack(ranks).sum(0)
        sum_error, alone = relative_error(total, whole), max(relative_error(mine, whole) for mine in ranks)
        if sum_error < alone:
            partial.append(name)  # each rank has a summand
        right = [total] if sum_error < alone else ranks
        errors[what] = max(relative_error(mine, whole, floor=least) for mine in right)
    return tuple(partial)


def _argument_signature(call: ModuleCall) -> tuple[object, ...]:
    values = (*call.args, *call.kwargs.values())
    tensors = unique_tensors_of(values)
    index = {id(tensor): number for number, tensor in enumerate(tensors)}
    # For each argument the numbers of its tensors: one that is passed twice has one number.
    indices = tuple(tuple(index[id(tensor)] for tensor in unique_tensors_of(value)) for value in values)
    return tuple(tuple(tensor.shape) for tensor in tensors), indices
