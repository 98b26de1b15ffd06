"""Trace of a model's layers: their connections in a forward pass of a copy, on fake tensors if possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import call_hooks, repeated_blocks
from atorch_ns.capture.nests import (
    map_tensors,
    resized_batch,
    samples_and_tokens,
    tensors_of,
    unique_tensors_of,
)
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.capture.real_values import tensor_metadata
from atorch_ns.capture.structure import copy_structure
from atorch_ns.errors import InputError
from atorch_ns.profile.record.fake_steps import FakeSteps
from atorch_ns.profile.record.steps import ModuleCall, StepPrecision, TracedModel
from atorch_ns.sharding.sequence.find_chains import find_chains
from atorch_ns.sharding.tensor.plan import kind_of
from atorch_ns.sharding.tensor.sequence import stream_of
from atorch_ns.torch_compat import TorchDispatchMode, plain_name


@dataclass
class BlockTrace:
    """The blocks that a model repeats, as one forward pass called them.

    Attributes:
        chains: paths of blocks between which nothing else sees the hidden states, in the order of calls.
        results: the first tensor that each block returned at its first call.
        users: paths of the blocks whose code uses a parameter with gradients, by all names of the parameter;
            an empty path stands for code outside blocks.
        kept: reasons why a block's hidden states are seen outside though it does not return them, by path.
    """

    chains: list[list[str]] = field(default_factory=list)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    users: dict[str, set[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    schema = func._schema
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    names = {argument.name for argument in schema.arguments if _is_changed(argument)}
    # Batch norm does not declare that it writes its statistics.
    if values.get("training", values.get("train")) is True:
        names |= {"running_mean", "running_var"}
    return [value for name, value in values.items() if name in names and isinstance(value, torch.Tensor)]


def _is_changed(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # shared by views; fake tensors have no data pointer


_log = logging.getLogger(__name__)

Run = Callable[[nn.Module, Any], Any]
"""``(model, batch) -> output``: one forward pass."""

Loss = Callable[[Any, Any], object]
"""``(batch, output) -> loss``."""

_NUM_SAMPLES, _NUM_TOKENS = 2, 16  # of the batch that is traced, where the model runs with so few

_SEED = 7


@dataclass
class LayerNode:
    """A layer that can be divided.

    Attributes:
        path: the layer's path.
        sources: the layers whose outputs reach its input with no other layer between.
        used_elsewhere: whether its parameters are used by code outside it.
    """

    path: str
    sources: set[str] = field(default_factory=set)
    used_elsewhere: bool = False


@dataclass
class LayerGraph:
    """The connections between layers, as one forward pass showed them.

    Attributes:
        nodes: the layers that were called, by path, in the order of first calls.
        outputs: layers whose outputs reach the model's output with no other layer between.
        met: layers whose outputs share an operator with a parameter outside layers, by the parameter's name.
        random: layers whose outputs reach an operator that draws random numbers.
        calls: the first call of every module, by path.
        read: places of the tensors that each module's first call returns and that other code reads, by path.
        read_by_code: addresses of the tensors that operators outside layers read.
        blocks: the trace of the blocks that the model repeats.
        stages: the stage of every unit of a pipeline, by its path: no region crosses a cut.
    """

    nodes: dict[str, LayerNode] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)
    met: dict[str, set[str]] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    read: dict[str, set[int]] = field(default_factory=dict)
    read_by_code: set[int] = field(default_factory=set)
    blocks: BlockTrace = field(default_factory=BlockTrace)
    stages: Mapping[str, int] = field(default_factory=dict)

    def stage_of(self, layer: str) -> int | None:
        """The stage that a layer is in; ``None`` without a pipeline, or outside of its units."""
        homes = accumulate(layer.split("."), "{}.{}".format)
        return next((self.stages[home] for home in homes if home in self.stages), None)

    def reads_in_code(self, tensor: torch.Tensor) -> bool:
        """Returns whether an operator outside layers reads an argument of :attr:`calls`."""
        return _storage_id(tensor) in self.read_by_code


def trace_layers(
    model: nn.Module,
    batch: Any,
    run: Run,
    *,
    multiple_of: int = 1,
    chains: bool = False,
    loss: Loss | None = None,
) -> LayerGraph:
    """Runs a copy of ``model`` once, in training mode; the model and all random states stay as they are.

    Args:
        model: the model, on any device, meta included.
        batch: a sample batch, on any device, as ``run`` takes it.
        multiple_of: a divisor of the number of tokens, where that is chosen here.
        chains: whether to look for chains of blocks, between which the sequence can stay divided.
        loss: traced for its uses of blocks' values. A loss that fails here is ignored.

    Raises:
        InputError: as :func:`find_chains`.
        Exception: the model's error on tensors without memory, if it fails with random weights too.
    """
    sizes = samples_and_tokens(batch)
    failure: Exception | None = None
    for how, size in ways_to_run(sizes, multiple_of):
        subject = TracedModel(model, batch, run, sizes, sizes)
        try:
            with how(subject, size) as (copy, small), torch.enable_grad():
                return _trace_model(model, copy, small, run, loss=loss if chains else None, chains=chains)
        # A refusal holds for every way to run.
        except InputError:
            raise
        except Exception as error:
            failure = failure or error  # the first one, of the smallest run without memory
    assert failure is not None
    raise failure


def ways_to_run(
    sizes: tuple[int, int], multiple_of: int = 1
) -> list[tuple[Callable[..., AbstractContextManager[tuple[nn.Module, Any]]], tuple[int, int]]]:
    """The ways to run a model's copy once: ``(subject, (B, T)) -> (copy, batch)`` with (B, T), in the order
    to try them; without memory first, the smallest first."""
    tokens = -(-_NUM_TOKENS // multiple_of) * multiple_of  # rounded up
    few = (min(sizes[0], _NUM_SAMPLES), min(sizes[1], tokens))
    return [(how, size) for how in (_without_memory, _with_memory) for size in dict.fromkeys((few, sizes))]


def _trace_model(
    model: nn.Module, copy: nn.Module, batch: Any, run: Run, *, loss: Loss | None, chains: bool
) -> LayerGraph:
    graph = LayerGraph()
    copy.train()
    flow = _Flow((copy, model), graph)
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for block in repeated_blocks(copy):
        blocks.setdefault(id(block.module), (plain_name(block.name), block.module))
    outputs: list[Any] = []

    def forward() -> None:
        outputs.append(run(copy, batch))
        if loss is not None:
            try:
                loss(batch, outputs[0])
            except InputError:
                raise
            except Exception:  # it may do what fake tensors do not support
                _log.debug("the loss cannot be followed", exc_info=True)

    calls: list[list[int]] = []
    with (
        flow,
        flow.watching(copy),
        call_hooks(blocks.values(), flow.enter_block, flow.leave_block, always=True),
    ):
        if chains:
            calls = find_chains([module for _, module in blocks.values()], forward)
        else:
            forward()
    flow.look_at_buffers(copy)
    # A block that is called several times is a chain of its own each time; they count as one.
    paths = [path for path, _ in blocks.values()]
    graph.blocks.chains = [list(chain) for chain in dict.fromkeys(tuple(paths[i] for i in c) for c in calls)]
    # The caller of the model reads what it returns.
    for tensor in unique_tensors_of(outputs):
        graph.outputs |= flow.of(tensor)
        flow.note_reads([tensor])
    return graph


def _without_memory(
    subject: TracedModel, sizes: tuple[int, int]
) -> AbstractContextManager[tuple[nn.Module, Any]]:
    return FakeSteps(subject, {}, "cpu").prepared(StepPrecision.parse("float32"), sizes)


@contextmanager
def _with_memory(subject: TracedModel, sizes: tuple[int, int]) -> Iterator[tuple[nn.Module, Any]]:
    # For a model whose code looks at values, which tensors without memory do not have.

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if kind != "parameter" and not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        values = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return values.normal_(std=0.02) if values.is_floating_point() else values

    with random_states_kept():
        torch.manual_seed(_SEED)  # all ranks look at the same values
        batch = map_tensors(torch.Tensor.cpu, subject.batch)
        yield copy_structure(subject.model, make, {}), resized_batch(batch, subject.sizes, sizes)


class _Flow(TorchDispatchMode):
    """Follows outputs of layers, and values that blocks compute from inputs, through operators by storage."""

    def __init__(self, models: tuple[nn.Module, nn.Module], graph: LayerGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph  # filled as the model runs
        self._sources: dict[int, set[str]] = {}  # by storage: the layers whose outputs flowed into it
        self._alive: list[Any] = []  # a freed storage's address could be reused
        self._active: list[str] = []  # the layers that are being called
        self._results: dict[int, list[tuple[str, int]]] = {}  # by storage: paths, and places in results
        self._used_elsewhere: set[str] = set()
        self._owners: dict[int, set[str]] = {}  # by storage of a parameter: the layers that have it
        self._names: dict[int, str] = {}  # of parameters outside layers, by storage
        self._block, self._streams = "", set[int]()  # a block, and hidden states that it was called with
        self._makers: dict[int, str] = {}  # blocks that have computed something of theirs
        self._all_names: dict[int, list[str]] = {}  # of all parameters, tied ones by each name
        for model in models:  # the copy that runs, and its original, whose parameters a loss may use
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self._all_names.setdefault(_storage_id(parameter), []).append(plain_name(name))
        for path, module in models[0].named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if kind_of(module) is not None:
                    self._owners.setdefault(_storage_id(parameter), set()).add(path)
                else:
                    self._names.setdefault(_storage_id(parameter), f"{path}.{name}" if path else name)

    def of(self, tensor: torch.Tensor) -> set[str]:
        """The layers whose outputs have flowed into ``tensor``."""
        return self._sources.get(_storage_id(tensor), set())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # asking for the device reads nothing
            return tensor_metadata(func, args)
        kwargs = dict(kwargs or {})
        inputs = tensors_of((args, tuple(kwargs.values())))
        sources = set().union(*(self.of(tensor) for tensor in inputs))
        # The model's code reads the inputs of an operator outside layers.
        if not self._active:
            self._graph.read_by_code.update(map(_storage_id, inputs))
            self._alive += [tensor.untyped_storage() for tensor in inputs]
        self.note_reads(inputs)
        memories = list(map(_storage_id, inputs))  # [inputs], their storages
        for memory in memories:
            self._note_use(memory, sources)
        if sources and _is_random(func, args, kwargs):
            self._graph.random |= sources
        self._note_block(func, memories)
        output = func(*args, **kwargs)
        # A value that a block computes from its hidden states is internal until the block returns it.
        if self._block and any(memory in self._streams or memory in self._makers for memory in memories):
            for tensor in (*unique_tensors_of(output), *_written_tensors(func, args, kwargs)):
                if _storage_id(tensor) not in self._streams:
                    self._makers[_storage_id(tensor)] = self._block
                    self._alive.append(tensor.untyped_storage())
        if sources:
            targets = inputs[:1] if func._schema.is_mutable else []  # in place: the first argument
            for tensor in (*tensors_of(output), *targets):
                self._set_sources(tensor, self.of(tensor) | sources)
        return output

    def note_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that code outside the modules that returned ``tensors`` reads them."""
        for tensor in tensors:
            for path, index in self._results.pop(_storage_id(tensor), ()):
                self._graph.read[path].add(index)

    def _note_use(self, memory: int, sources: set[str]) -> None:
        if memory in self._names and sources:  # a parameter outside layers meets outputs of layers
            self._graph.met.setdefault(self._names[memory], set()).update(sources)
        owners = self._owners.get(memory, set())
        if owners and not owners & set(self._active):  # read while none of its layers runs
            self._used_elsewhere |= owners

    def _note_block(self, func: Any, memories: list[int]) -> None:
        trace, where = self._graph.blocks, f"in {self._block}" if self._block else "outside it"
        for memory in memories:
            # Reading without a gradient does not count as a use.
            if torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
                for name in self._all_names.get(memory, ()):
                    trace.users.setdefault(name, set()).add(self._block)
            maker = self._makers.get(memory, self._block)
            if maker != self._block:
                trace.kept.setdefault(maker, f"code {where} uses what it makes and does not return")

    def look_at_buffers(self, model: nn.Module) -> None:
        """Notes buffers that hold hidden states of blocks after the pass."""
        for name, buffer in model.named_buffers():
            block = self._makers.get(_storage_id(buffer))
            if block is not None:
                self._graph.blocks.kept.setdefault(block, f"it updates {plain_name(name)} from them")

    def enter_block(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._block:
            self._block = path
            stream = stream_of(args, kwargs, 0)
            self._streams = set() if stream is None else {_storage_id(stream)}

    def leave_block(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if self._block != path:
            return
        self._block, self._streams = "", set()
        tensors = unique_tensors_of(output)
        for tensor in tensors:
            self._makers.pop(_storage_id(tensor), None)
        if tensors:
            self._graph.blocks.results.setdefault(path, tensors[0])

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        with call_hooks(model.named_modules(), self._enter_module, self._leave_module):
            yield
        for owner in self._used_elsewhere & self._graph.nodes.keys():
            self._graph.nodes[owner].used_elsewhere = True

    def _enter_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._graph.calls.setdefault(path, ModuleCall(tuple(args), dict(kwargs)))  # the first call
        if kind_of(module) is not None:
            sources = set().union(*(self.of(tensor) for tensor in unique_tensors_of((args, kwargs))))
            self._graph.nodes.setdefault(path, LayerNode(path)).sources |= sources
            self._active.append(path)

    def _leave_module(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if path not in self._graph.read:
            self._graph.read[path] = set()
            for index, tensor in enumerate(unique_tensors_of(output)):
                self._results.setdefault(_storage_id(tensor), []).append((path, index))
                self._alive.append(tensor.untyped_storage())
        if kind_of(module) is None:
            return
        self._active.remove(path)
        sources = set() if isinstance(module, nn.Embedding) else {path}  # no column: its results are whole
        for tensor in unique_tensors_of(output):
            self._set_sources(tensor, sources)

    def _set_sources(self, tensor: torch.Tensor, sources: set[str]) -> None:
        self._sources[_storage_id(tensor)] = sources
        self._alive.append(tensor.untyped_storage())


def _is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # Attention has the tag even where its dropout is 0: the argument decides, by position or by name.
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in ("dropout_p", "p"):
            return bool(value)
    names = [argument.name for argument in func._schema.arguments]
    return bool(kwargs.get("dropout_p", 0.0 if "dropout_p" in names else 1.0))
