"""How the layers of a model are connected: one forward pass of a copy, on fake tensors where it runs on them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.profile._batches import batch_sizes, map_batch, resized_shape
from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.profile._fake_steps import FakeSteps
from atorch_ns.profile._precisions import Precision
from atorch_ns.profile._steps import Subject
from atorch_ns.profile._structure import copy_structure
from atorch_ns.sharding._tensor_blocks import BlockTrace, follow_blocks
from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.torch_compat import TorchDispatchMode

__all__ = ["LayerGraph", "ModuleCall", "Node", "trace_layers", "ways_to_run"]

_log = logging.getLogger(__name__)

Run = Callable[[nn.Module, Any], Any]
"""``(model, batch) -> output``: one forward pass."""

Loss = Callable[[Any, Any], object]
"""``(batch, output) -> loss``."""

_NUM_SAMPLES, _NUM_TOKENS = 2, 16
"""Sizes of the batch that is traced, where the model runs with so few tokens."""

_SEED = 7


@dataclass(frozen=True)
class ModuleCall:
    """The first call of a module: nests of fake or real tensors and plain values.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass
class Node:
    """A layer that can be divided, in the order of first calls.

    Attributes:
        path: of the layer.
        sources: the layers whose outputs reach its input with no other layer between.
        used_elsewhere: whether its parameters are used by code outside it.
    """

    path: str
    sources: set[str] = field(default_factory=set)
    used_elsewhere: bool = False


@dataclass
class LayerGraph:
    """What one forward pass showed.

    Attributes:
        nodes: the layers that were called, by path.
        outputs: layers whose outputs reach the model's output with no other layer between.
        met: for parameters outside layers, the layers whose outputs meet them in an operator, by name.
        random: layers whose outputs reach something that draws random numbers.
        calls: the first call of every module, by path.
        blocks: what the blocks that the model repeats do.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)
    met: dict[str, set[str]] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    blocks: BlockTrace = field(default_factory=BlockTrace)


def trace_layers(
    model: nn.Module,
    batch: Any,
    run: Run,
    *,
    multiple_of: int = 1,
    runs: bool = False,
    loss: Loss | None = None,
) -> LayerGraph:
    """Runs a copy of ``model`` once, in training mode; the model itself and all random states stay as they are.

    Args:
        model: on any device, meta too.
        batch: a sample batch on the CPU, as ``run`` takes it.
        run: ``(model, batch) -> output``.
        multiple_of: what the number of tokens should be a multiple of.
        runs: whether to look for runs of blocks, between which the sequence can stay divided.
        loss: looked at for what it uses of blocks; a loss that fails here is none.

    Raises:
        InputError: of :func:`find_runs`.
        Exception: what the model raises on tensors without memory, if it does not run with random weights either.
    """
    sizes = batch_sizes(batch)
    failure: Exception | None = None
    for how, size in ways_to_run(sizes, multiple_of):
        subject = Subject(
            model=model, batch=batch, forward_loss=run, blocks={}, prints={}, sizes=sizes, at=sizes
        )
        try:
            with how(subject, size) as (copy, small), torch.enable_grad():
                return _followed(model, copy, small, run, loss if runs else None, runs=runs)
        except InputError:
            raise
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def ways_to_run(
    sizes: tuple[int, int], multiple_of: int = 1
) -> list[tuple[Callable[..., AbstractContextManager[tuple[nn.Module, Any]]], tuple[int, int]]]:
    """How to run a copy of a model once, in the order to try them: ``(subject, B and T) -> (copy, batch)``, and B and
    T; the smallest first, without memory first."""
    tokens = -(-_NUM_TOKENS // multiple_of) * multiple_of
    few = (min(sizes[0], _NUM_SAMPLES), min(sizes[1], tokens))
    return [(how, size) for how in (_without_memory, _with_memory) for size in dict.fromkeys((few, sizes))]


def _followed(
    model: nn.Module, copy: nn.Module, batch: Any, run: Run, loss: Loss | None, *, runs: bool
) -> LayerGraph:
    graph = LayerGraph()
    copy.train()
    flow = _Flow(copy, graph)
    outputs: list[Any] = []

    def forward() -> None:
        outputs.append(run(copy, batch))
        if loss is not None:
            try:
                loss(batch, outputs[0])
            except InputError:
                raise
            except Exception:  # it may do with fake tensors what they refuse
                _log.debug("the loss cannot be followed", exc_info=True)

    with flow, flow.watching(copy):
        graph.blocks = follow_blocks(copy, forward, original=model, runs=runs)
    for tensor in tensors_in(outputs):
        graph.outputs |= flow.of(tensor)
    return graph


def _without_memory(
    subject: Subject, sizes: tuple[int, int]
) -> AbstractContextManager[tuple[nn.Module, Any]]:
    return FakeSteps(subject, {}, "cpu").prepared(Precision.parse("float32"), sizes)


@contextlib.contextmanager
def _with_memory(subject: Subject, sizes: tuple[int, int]) -> Iterator[tuple[nn.Module, Any]]:
    """A copy with random weights, for a model whose code looks at values."""

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if kind != "parameter" and not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        filled = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return filled.normal_(std=0.02) if filled.is_floating_point() else filled

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = resized_shape(tuple(tensor.shape), subject.sizes, sizes)
        for dim, size in enumerate(shape):
            tensor = tensor.narrow(dim, 0, size)
        return tensor.clone()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)  # all ranks look at the same values
        yield copy_structure(subject.model, make, {}), map_batch(resized, subject.batch)


class _Flow(TorchDispatchMode):
    """Follows the outputs of layers through the operators between them, by the memory they lie in."""

    def __init__(self, model: nn.Module, graph: LayerGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._sources: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # a freed storage's address would be used again
        self._active: list[str] = []
        self._used_elsewhere: set[str] = set()
        self._owners: dict[int, set[str]] = {}
        self._names: dict[int, str] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if kind_of(module) is not None:
                    self._owners.setdefault(_memory(parameter), set()).add(path)
                else:
                    self._names.setdefault(_memory(parameter), f"{path}.{name}" if path else name)

    def of(self, tensor: torch.Tensor) -> set[str]:
        """The layers whose outputs have flowed into ``tensor``."""
        return self._sources.get(_memory(tensor), set())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = _tensors((args, tuple(kwargs.values())))
        found = set().union(*(self.of(tensor) for tensor in inputs))
        for memory in map(_memory, inputs):
            self._note_use(memory, found)
        if found and _is_random(func, args, kwargs):
            self._graph.random |= found
        output = func(*args, **kwargs)
        if found:
            changed = inputs[:1] if func._schema.is_mutable else []
            for tensor in (*_tensors(output), *changed):
                self._set(tensor, self.of(tensor) | found)
        return output

    def _note_use(self, memory: int, sources: set[str]) -> None:
        """An operator reads what lies in ``memory``, with results of ``sources``."""
        if memory in self._names and sources:
            self._graph.met.setdefault(self._names[memory], set()).update(sources)
        owners = self._owners.get(memory, set())
        if owners and not owners & set(self._active):
            self._used_elsewhere |= owners

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Notes every call of every module."""
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._before(path), with_kwargs=True)
            module.register_forward_hook(self._after(path))
        yield
        for owner in self._used_elsewhere & self._graph.nodes.keys():
            self._graph.nodes[owner].used_elsewhere = True

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._graph.calls.setdefault(path, ModuleCall(tuple(args), dict(kwargs)))
            if kind_of(module) is not None:
                found = set().union(*(self.of(tensor) for tensor in tensors_in((args, kwargs))))
                self._graph.nodes.setdefault(path, Node(path)).sources |= found
                self._active.append(path)

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if kind_of(module) is None:
                return
            self._active.remove(path)
            own = set() if isinstance(module, nn.Embedding) else {path}
            for tensor in tensors_in(output):
                self._set(tensor, own)

        return hook

    def _set(self, tensor: torch.Tensor, sources: set[str]) -> None:
        self._sources[_memory(tensor)] = sources
        self._alive.append(tensor.untyped_storage())


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers: not attention whose dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in ("dropout_p", "p"):
            return bool(value)
    named = [argument.name for argument in func._schema.arguments]
    return bool(kwargs.get("dropout_p", 0.0 if "dropout_p" in named else 1.0))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
