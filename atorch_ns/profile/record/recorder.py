"""Recorder: operators and memory of one step as events, and the block whose pass each belongs to."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from atorch_ns.capture.blocks import call_hooks
from atorch_ns.capture.nests import unique_tensors_of
from atorch_ns.capture.operators import is_free, label
from atorch_ns.capture.real_values import tensor_metadata
from atorch_ns.costs.count import count_flops, is_attention, is_causal, moved_bytes, position_of
from atorch_ns.costs.workspaces import workspace_bytes
from atorch_ns.torch_compat import TorchDispatchMode


class MatrixProduct(NamedTuple):
    """A matrix product ``left @ right (+ bias)``; tensors by their marks (see :attr:`Recording.reads`).

    Attributes:
        left, right: the factors; ``right`` is [K, N].
        transposed: whether ``right`` lies in memory as [N, K].
        bias: the summand; ``None`` without one.
    """

    left: int
    right: int
    transposed: bool
    bias: int | None = None


class Attention(NamedTuple):
    """A fused attention.

    Attributes:
        queries, keys: numbers of heads.
        width: features of a head.
        is_causal: whether no token sees a later one.
        num_queries: number of query tokens.
    """

    queries: int
    keys: int
    width: int
    is_causal: bool
    num_queries: int


class Event(IntEnum):
    """The kind of an event."""

    ALLOCATE = 0  # memory first: kinds up to FREE change what is alive
    FREE = 1
    OPERATOR = 2
    PHASE = 3


@dataclass
class Recording:
    """The events of one step, as parallel lists.

    Attributes:
        keys: the storage's number for memory, the phase for a change of phase, -1 for operators.
        labels: the operator's name, empty for other events.
        sizes: bytes for memory, floating point operations for operators.
        moved: bytes of each tensor that an operator reads or writes.
        gradients: storages that became gradients of parameters.
        gradient_of: number, among the given tensors, of the parameter of each gradient.
        casts: storages that are copies of parameters in another dtype.
        uses: phases that read each given tensor, in order, by the tensor's number.
        reads, writes: inputs and outputs of the operator at each event: a storage by its number, a given
            tensor as -1 less its number.
        products: the operators, by their events, that are products of matrices.
        attentions: fused attentions of forward passes, by event.
    """

    kinds: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    moved: list[tuple[int, ...]] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)
    gradient_of: dict[int, int] = field(default_factory=dict)
    casts: set[int] = field(default_factory=set)
    uses: dict[int, list[int]] = field(default_factory=dict)
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    writes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    products: dict[int, MatrixProduct] = field(default_factory=dict)
    attentions: dict[int, Attention] = field(default_factory=dict)

    def add(
        self, kind: Event, key: int, name: str = "", size: int = 0, *, moved: tuple[int, ...] = ()
    ) -> None:
        """Appends one event."""
        self.kinds.append(kind)
        self.keys.append(key)
        self.labels.append(name)
        self.sizes.append(size)
        self.moved.append(moved)

    def operators(self) -> Iterator[tuple[int, int]]:
        """Each operator's event, with its phase."""
        phase = 0
        for event, (kind, key) in enumerate(zip(self.kinds, self.keys, strict=True)):
            if kind == Event.PHASE:
                phase = key
            elif kind == Event.OPERATOR:
                yield event, phase

    def settle(self) -> None:
        """Sorts simultaneous frees by their allocation, since their order is random."""
        start = 0
        for index in range(len(self.kinds) + 1):
            if index == len(self.kinds) or self.kinds[index] != Event.FREE:
                self.keys[start:index] = sorted(self.keys[start:index])
                start = index + 1  # of the next run of frees

    def same_events(self, other: Recording) -> bool:
        """Whether both have the same events in the same order, sizes aside."""
        return (
            self.kinds == other.kinds
            and self.keys == other.keys
            and self.labels == other.labels
            and self.gradients == other.gradients
            and self.casts == other.casts
        )


class OperatorRecorder(TorchDispatchMode):
    """Records operators and the life of every storage they make, on fake or real tensors.

    Storages that exist before (parameters, buffers, the batch) are given; only what operators allocate is
    recorded, and of what a kernel takes and returns inside one call what :func:`workspace_bytes` knows.

    Args:
        tensors: tensors whose memory is not to be counted, numbered in this order.
        parameters: given tensors that are parameters: copies of them in another dtype are recorded as casts.
        counts_workspaces: whether the kernels of the device that is traced are those of the requested device.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        parameters: Iterable[nn.Parameter],
        *,
        counts_workspaces: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts_workspaces = counts_workspaces
        self.recording = Recording()
        self.phase = -1
        self._numbers: dict[int, int] = {}
        self._storages: list[Any] = []  # a storage's address names it only as long as it lives
        for number, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            self._storages.append(storage)
            self._numbers.setdefault(storage._cdata, number)
        self._parameters = list(parameters)
        self._parameter_storages = {p.untyped_storage()._cdata for p in self._parameters}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._count = 0

    @contextmanager
    def running(self) -> Iterator[OperatorRecorder]:
        """Records what runs inside; memory is freed in a fixed order."""
        handles = [
            p.register_post_accumulate_grad_hook(self._note_grad) for p in self._parameters if p.requires_grad
        ]
        collects = gc.isenabled()
        gc.disable()  # it would free cycles at other places in each step
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()
            if collects:
                gc.enable()
            self._live.clear()  # later releases do not belong to the step
            self.recording.settle()

    def enter_phase(self, phase: int) -> None:
        """Assigns later events to ``phase``.

        Garbage in cycles, such as a frame that a handled exception holds, is collected here and nowhere else:
        often, as Python does it, but at the same places in every step.
        """
        if phase != self.phase:
            gc.collect(1)
            self.phase = phase
            self.recording.add(Event.PHASE, phase)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # questions about a tensor
            return tensor_metadata(func, args)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = _dense_tensors(out)
        if is_free(func):  # a view, or memory without values
            for tensor in results:
                self._record_allocation(tensor)
            return out
        read = _dense_tensors(args)
        if kwargs:
            read += _dense_tensors(tuple(kwargs.values()))
        for tensor in read:
            self._note_use(tensor)
        flops = count_flops(func, args, kwargs, out)
        self.recording.add(Event.OPERATOR, -1, label(func), flops, moved=moved_bytes([*read, *results]))
        event = len(self.recording.kinds) - 1
        for tensor in results:
            self._record_allocation(tensor)
        if self._counts_workspaces:
            self._pass_through(workspace_bytes(func, args, out))
        self._note_operands(
            event, func, args, read, results=results
        )  # after the allocations, which number results
        self._note_attention(event, func, args, kwargs)
        if func is torch.ops.aten._to_copy.default:
            self._note_cast(read[0], results[0])
        return out

    def _note_operands(
        self,
        event: int,
        func: Any,
        args: tuple[Any, ...],
        read: list[torch.Tensor],
        *,
        results: list[torch.Tensor],
    ) -> None:
        self.recording.reads[event] = tuple(self._storage_number(tensor) for tensor in read)
        self.recording.writes[event] = tuple(self._storage_number(tensor) for tensor in results)
        factors = _FACTORS.get(func)
        if factors is not None:
            left, right, bias = factors
            strides = args[right].stride()
            self.recording.products[event] = MatrixProduct(
                self._storage_number(args[left]),
                self._storage_number(args[right]),
                strides[-1] != 1 and strides[-2] == 1,  # the transpose of a weight [N, K], as of nn.Linear
                None if bias is None else self._storage_number(args[bias]),
            )

    def _note_attention(
        self, event: int, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if (
            is_attention(self.recording.labels[event])
            and position_of(func, "query") == 0
            and args[0].dim() == 4  # [B, heads, T, width]
        ):
            query, key = args[:2]
            self.recording.attentions[event] = Attention(
                query.shape[1], key.shape[1], query.shape[3], is_causal(func, args, kwargs), query.shape[2]
            )

    def _storage_number(self, tensor: torch.Tensor) -> int:
        address = tensor.untyped_storage()._cdata
        number = self._numbers.get(address)
        return self._live[address][0] if number is None else -1 - number  # below 0: given

    def _record_allocation(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live or address in self._numbers:  # a view, or written in place
            return
        number, self._count = self._count, self._count + 1
        self._live[address] = (number, weakref.ref(storage, partial(self._record_free, address, number)))
        self.recording.add(Event.ALLOCATE, number, size=storage.nbytes())

    def _pass_through(self, sizes: tuple[int, ...]) -> None:
        first = self._count  # workspaces: no tensor has these numbers
        self._count += len(sizes)
        for number, num_bytes in enumerate(sizes, first):
            self.recording.add(Event.ALLOCATE, number, size=num_bytes)
        for number in range(first, self._count):
            self.recording.add(Event.FREE, number)

    def _record_free(self, address: int, number: int, _: Any) -> None:
        if self._live.pop(address, None) is not None:
            self.recording.add(Event.FREE, number)

    def _note_use(self, tensor: torch.Tensor) -> None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None:
            phases = self.recording.uses.setdefault(number, [])
            if not phases or phases[-1] != self.phase:
                phases.append(self.phase)

    def _note_cast(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        if source.untyped_storage()._cdata in self._parameter_storages and copy.dtype != source.dtype:
            entry = self._live.get(copy.untyped_storage()._cdata)
            if entry is not None:
                self.recording.casts.add(entry[0])

    def _note_grad(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:  # no sparse gradient
            entry = self._live.get(parameter.grad.untyped_storage()._cdata)
            if entry is not None:
                self.recording.gradients.add(entry[0])
                number = self._numbers.get(parameter.untyped_storage()._cdata)
                if number is not None:
                    self.recording.gradient_of[entry[0]] = number


_FACTORS: Mapping[Any, tuple[int, int, int | None]] = {
    torch.ops.aten.mm.default: (0, 1, None),
    torch.ops.aten.addmm.default: (1, 2, 0),
}
"""Positions of the left factor, the right factor and the summand among an operator's arguments."""


def _dense_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout is torch.strided else []
    tensors: list[torch.Tensor] = []
    if isinstance(value, (tuple, list)):
        for item in value:  # lists of tensors are one deep
            if isinstance(item, torch.Tensor):
                if item.layout is torch.strided:
                    tensors.append(item)
            elif isinstance(item, (tuple, list)):
                tensors += [t for t in item if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    return tensors


@dataclasses.dataclass
class Occurrence:
    """One stretch of the forward pass: one call of a block, or the code between two calls.

    Attributes:
        block: path of the block, in the model that runs; empty between blocks.
        inputs: shapes and dtypes of the tensors that the block was called with.
        outputs: bytes of each storage that it returned or passed to the next block.
    """

    block: str = ""
    inputs: tuple[tuple[tuple[int, ...], str], ...] = ()
    outputs: tuple[int, ...] = ()


def forward_of(occurrence: int) -> int:
    """The phase of an occurrence's forward pass."""
    return 2 * occurrence


def backward_of(occurrence: int) -> int:
    """The phase of an occurrence's backward pass."""
    return 2 * occurrence + 1


class Boundaries:
    """Sets the recorder's phase, by hooks on blocks and on the tensors that pass between them.

    The backward pass of a block begins when the gradient of one of its outputs is complete.
    """

    def __init__(self, recorder: OperatorRecorder, blocks: Mapping[str, nn.Module]) -> None:
        self.occurrences = [Occurrence()]
        self._recorder = recorder
        self._blocks = blocks
        self._is_backward = False
        self._inside: str | None = None  # the block that runs
        self._hook_refs: list[weakref.ref[torch.Tensor]] = []  # one hook for a tensor between two blocks

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the blocks; the first stretch begins at once."""
        # Before hooks that cast inputs, whose work is the block's.
        with call_hooks(self._blocks.items(), self._enter_block, self._leave_block, prepend=True):
            self._recorder.enter_phase(forward_of(0))
            yield

    def start_backward(self) -> None:
        """Marks the end of the forward pass, when all of its remaining tensors are alive."""
        self._is_backward = True
        self._begin_backward(len(self.occurrences) - 1)

    def _enter_block(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_backward or self._inside is not None:
            return  # recomputed, or a block inside a block
        tensors = unique_tensors_of((args, kwargs))
        self._hook_gradients(tensors, len(self.occurrences) - 1)
        if not self.occurrences[-1].block:  # the stretch before hands on what this block takes
            self.occurrences[-1].outputs = _storage_bytes(tensors)
        self._inside = path
        shapes = tuple((tuple(t.shape), str(t.dtype)) for t in tensors)
        self._begin_occurrence(Occurrence(block=path, inputs=shapes))

    def _leave_block(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if self._is_backward or self._inside != path:
            return
        tensors = unique_tensors_of(output)
        self.occurrences[-1].outputs = _storage_bytes(tensors)
        self._hook_gradients(tensors, len(self.occurrences) - 1)
        self._inside = None
        self._begin_occurrence(Occurrence())

    def _begin_occurrence(self, occurrence: Occurrence) -> None:
        self.occurrences.append(occurrence)
        self._recorder.enter_phase(forward_of(len(self.occurrences) - 1))

    def _hook_gradients(self, tensors: list[torch.Tensor], occurrence: int) -> None:
        alive = {id(tensor) for ref in self._hook_refs if (tensor := ref()) is not None}
        for tensor in tensors:
            if tensor.grad_fn is not None and id(tensor) not in alive:
                tensor.register_hook(lambda _: self._begin_backward(occurrence))
                self._hook_refs.append(weakref.ref(tensor))

    def _begin_backward(self, occurrence: int) -> None:
        phase = backward_of(occurrence)
        current = self._recorder.phase
        if self._is_backward and (current % 2 == 0 or phase < current):  # from the last stretch to the first
            self._recorder.enter_phase(phase)


def _storage_bytes(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return tuple(storages.values())
