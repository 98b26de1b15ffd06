"""Boundaries: which stretch of the forward pass runs, and whose backward pass."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from atorch_ns.profile._recorder import Recorder

__all__ = ["Boundaries", "Occurrence", "backward_of", "forward_of", "tensors_in"]


@dataclasses.dataclass
class Occurrence:
    """One stretch of the forward pass: one call of a block, or what runs between two calls.

    Attributes:
        block: path of the block, in the model that runs; empty between blocks.
        inputs: shapes and dtypes of the tensors that the block was called with.
        outputs: bytes of each storage that it returned, or that the next block is called with.
    """

    block: str = ""
    inputs: tuple[tuple[tuple[int, ...], str], ...] = ()
    outputs: tuple[int, ...] = ()


def forward_of(occurrence: int) -> int:
    """The phase that is the forward pass of an occurrence."""
    return 2 * occurrence


def backward_of(occurrence: int) -> int:
    """The phase that is the backward pass of an occurrence."""
    return 2 * occurrence + 1


class Boundaries:
    """Tells the recorder the phase, by hooks on blocks and on the tensors that pass between them.

    The backward pass of a block begins when the gradient of one of its outputs is complete.

    Args:
        recorder: what is told.
        blocks: the blocks, by path.
    """

    def __init__(self, recorder: Recorder, blocks: Mapping[str, nn.Module]) -> None:
        self.occurrences = [Occurrence()]
        self._recorder = recorder
        self._blocks = blocks
        self._is_backward = False
        self._inside: str | None = None
        self._hooked: list[weakref.ref[torch.Tensor]] = []
        self._handles: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the blocks; the first stretch begins at once."""
        for path, block in self._blocks.items():
            # Before hooks that cast inputs, whose work is the block's.
            self._handles.append(
                block.register_forward_pre_hook(self._entering(path), with_kwargs=True, prepend=True)
            )
            self._handles.append(block.register_forward_hook(self._leaving(path)))
        self._recorder.enter_phase(forward_of(0))
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def start_backward(self) -> None:
        """The forward pass is over and all that it leaves behind is alive."""
        self._is_backward = True
        self._backward(len(self.occurrences) - 1)

    def _entering(self, path: str) -> Callable[..., None]:
        def entering(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_backward or self._inside is not None:
                return  # recomputed, or a block inside a block
            tensors = tensors_in((args, kwargs))
            self._hook(tensors, len(self.occurrences) - 1)
            if not self.occurrences[-1].block:
                self.occurrences[-1].outputs = _storage_bytes(tensors)
            self._inside = path
            shapes = tuple((tuple(t.shape), str(t.dtype)) for t in tensors)
            self._begin(Occurrence(block=path, inputs=shapes))

        return entering

    def _leaving(self, path: str) -> Callable[..., None]:
        def leaving(_: nn.Module, __: Any, output: Any) -> None:
            if self._is_backward or self._inside != path:
                return
            tensors = tensors_in(output)
            self.occurrences[-1].outputs = _storage_bytes(tensors)
            self._hook(tensors, len(self.occurrences) - 1)
            self._inside = None
            self._begin(Occurrence())

        return leaving

    def _begin(self, occurrence: Occurrence) -> None:
        self.occurrences.append(occurrence)
        self._recorder.enter_phase(forward_of(len(self.occurrences) - 1))

    def _hook(self, tensors: list[torch.Tensor], occurrence: int) -> None:
        """When the gradient of one of the tensors is complete, the backward pass of its maker begins."""
        alive = {id(tensor) for ref in self._hooked if (tensor := ref()) is not None}
        for tensor in tensors:
            if tensor.grad_fn is not None and id(tensor) not in alive:
                tensor.register_hook(lambda _: self._backward(occurrence))
                self._hooked.append(weakref.ref(tensor))

    def _backward(self, occurrence: int) -> None:
        phase = backward_of(occurrence)
        current = self._recorder.phase
        if self._is_backward and (current % 2 == 0 or phase < current):
            self._recorder.enter_phase(phase)


def _storage_bytes(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return tuple(storages.values())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nest of tuples, lists, mappings and dataclass instances, each once, in order."""
    found: dict[int, torch.Tensor] = {}
    _collect(value, found)
    return list(found.values())


def _collect(value: Any, found: dict[int, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.setdefault(id(value), value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            _collect(getattr(value, entry.name, None), found)
