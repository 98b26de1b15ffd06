"""Recomputation that writes buffers, such as running statistics, and caches only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from atorch_ns.capture.nests import can_be_written, copied_state
from atorch_ns.torch_compat import leave_uncompiled


def offload_saved(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Makes ``function(module, *args, **kwargs)`` save tensors for backward in pinned host memory.

    A recomputed module saves only its positional inputs. Copies do not overlap computation; a CPU needs none.
    """
    if device.type == "cpu":
        return function

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True, device_type=device.type):
            return function(module, *args, **kwargs)

    return call


class _NeverRaised(Exception):
    """Exception of a handler that only has to be active."""


class _Place(NamedTuple):
    """Location of a buffer: its module and name."""

    owner: nn.Module
    name: str

    @property
    def buffer(self) -> Tensor | None:
        return cast(Tensor | None, getattr(self.owner, self.name))

    @property
    def is_statistic(self) -> bool:
        """True for a statistic of a batch or instance norm, whose kernels skip version counters."""
        return bool(getattr(self.owner, "track_running_stats", False))


@final
class BufferSafeRecompute:
    """``function(module, *args, **kwargs)``, a recomputation, with each buffer of the module written once.

    The recomputation sees buffers and arguments, such as a cache, as they were before the forward pass; what
    it writes is thrown away. Made for one module. Copied are statistics of batch and instance norms, and what
    the first forward pass in training changes. Other buffers are watched by their versions, and copied from
    the first change on. A block that is compiled as one graph writes once as it is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._written: list[_Place] = []
        self._watched: list[_Place] | None = None  # not seen to be written; None before the first pass
        self._was_compared = False  # whether a pass in training has been compared by values

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of ``module`` for these arguments."""
        if torch.compiler.is_compiling():
            # After a graph break a frame with an open handler is skipped: the call comes again, uncompiled.
            try:
                return self._function(module, *args, **kwargs)
            except _NeverRaised:
                raise
        if not torch.is_grad_enabled():
            return self._function(module, *args, **kwargs)
        if self._watched is None:
            self._list_buffers(module)
        writable = any(map(can_be_written, (*args, *kwargs.values())))
        if not self._written and not self._watched and not writable:
            return self._function(module, *args, **kwargs)
        return self._function(_Passes(self, module), *args, **kwargs)

    def _list_buffers(self, module: nn.Module) -> None:
        places = [
            _Place(owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._written = [slot for slot in places if slot.is_statistic]
        self._watched = [slot for slot in places if not slot.is_statistic]

    @contextmanager
    def watch(self, training: bool) -> Iterator[dict[_Place, Tensor]]:
        """Collects the values before a forward pass of the buffers it writes. Filled when it ends."""
        before: dict[_Place, Tensor] = {}
        _save_buffers(self._written, before)
        places = list(self._watched or ())
        compares = training and not self._was_compared
        values: dict[_Place, Tensor] = {}
        if compares:
            _save_buffers(places, values)
        # A buffer may be replaced, written to, or changed without a new version.
        records = [(slot, slot.buffer, _buffer_version(slot.buffer)) for slot in places]
        yield before
        for slot, buffer, version in records:
            now = slot.buffer
            if now is not buffer or _buffer_version(now) != version or _has_changed(now, values.get(slot)):
                _save_buffers([slot], before)
                # The copy just saved is the value after the pass; an earlier value, if known, replaces it.
                if slot in values:
                    before[slot] = values[slot]
                self._mark_written(slot)
        self._was_compared |= compares

    def _mark_written(self, slot: _Place) -> None:
        if slot not in self._written:
            self._written.append(slot)
        self._watched = [other for other in self._watched or () if other != slot]


@final
class _Passes:
    """A module that is called once in the forward pass and again for each recomputation."""

    def __init__(self, owner: BufferSafeRecompute, module: nn.Module) -> None:
        self._owner = owner
        self._module = module
        self._before: dict[_Place, Tensor] | None = None
        self._arguments: list[Any] = []  # copies of those that can be written to, from before the pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:  # a recomputation
            copies = iter(copied_state(self._arguments))
            values = [next(copies) if can_be_written(value) else value for value in (*args, *kwargs.values())]
            with _in_place_of(self._before):
                leave_uncompiled()
                return self._module(
                    *values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True))
                )
        self._arguments = copied_state(
            [value for value in (*args, *kwargs.values()) if can_be_written(value)]
        )
        with self._owner.watch(self._module.training) as before:
            leave_uncompiled()
            out = self._module(*args, **kwargs)
        self._before = before
        return out


@contextmanager
def _in_place_of(before: dict[_Place, Tensor]) -> Iterator[None]:
    """Replaces the buffers by copies of ``before`` inside, and restores the untouched buffers."""
    buffers = {slot: slot.buffer for slot in before}
    try:
        for slot, value in before.items():
            setattr(slot.owner, slot.name, _clone_tensor(value))
        yield
    finally:
        for slot, buffer in buffers.items():
            setattr(slot.owner, slot.name, buffer)


def _save_buffers(places: list[_Place], into: dict[_Place, Tensor]) -> None:
    for slot in places:
        buffer = slot.buffer
        if buffer is not None:
            into[slot] = _clone_tensor(buffer)


def _clone_tensor(value: Tensor) -> Tensor:
    # Not by aten.clone, which a selective recomputation would take for one of the module's.
    with torch.no_grad():
        return torch.empty_like(value).copy_(value)


def _buffer_version(buffer: Tensor | None) -> int | None:
    return None if buffer is None or buffer.is_inference() else buffer._version


def _has_changed(now: Tensor | None, before: Tensor | None) -> bool:
    """Returns whether values changed without a new version, as through ``.data`` or a user's kernel."""
    if before is None or type(now) is not Tensor or now.is_meta or now.layout != torch.strided:
        return False
    return now.shape == before.shape and not torch.equal(now, before)
