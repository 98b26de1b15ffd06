"""Forward pass of a stage: which units run, what stand-ins return, and what crosses the cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.nests import map_instances, tensors_of
from atorch_ns.capture.random_states import random_stream
from atorch_ns.errors import StepError
from atorch_ns.pipeline.cut.crossing import Carried, Crossing
from atorch_ns.pipeline.cut.graph import CallGraph, TensorSignature
from atorch_ns.torch_compat import is_view

CALL_STRIDE = 7_919  # coprime to MICRO_BATCH_STRIDE: no two calls of a batch share a seed
"""The difference of the seeds of two calls of one pass."""


class StageEnd(Exception):
    """Raised after a stage's last call and caught by the stage, so that the model does not go on."""


@dataclass(frozen=True, kw_only=True)
class StageRange:
    """A stage: contiguous calls, and the crossings of the cuts around it.

    Attributes:
        begin, end: its calls are ``begin`` to ``end - 1``.
        received: crossing of the cut before it; ``None`` for the first stage.
        sent: crossing of the cut after it; ``None`` for the last stage.
    """

    begin: int
    end: int
    received: Crossing | None
    sent: Crossing | None


@dataclass(frozen=True, kw_only=True)
class CrossingPieces:
    """Division of crossing tensors over ranks that would otherwise all send the same.

    Attributes:
        dim: the divided dimension.
        divide: function that takes this rank's piece of a tensor.
        join: function that joins all pieces to the whole tensor.
    """

    dim: int
    num_ranks: int
    divide: Callable[[torch.Tensor], torch.Tensor]
    join: Callable[[torch.Tensor], torch.Tensor]

    def of(self, stage: StageRange) -> StageRange:
        """A stage that receives and sends pieces of divisible tensors with gradients."""
        received, sent = (self._divide_crossing(crossing) for crossing in (stage.received, stage.sent))
        return replace(stage, received=received, sent=sent)

    def _divide_crossing(self, crossing: Crossing | None) -> Crossing | None:
        if crossing is None:
            return None
        return replace(crossing, carried=tuple(map(self._divide_carried, crossing.carried)))

    def _divide_carried(self, tensor: Carried) -> Carried:
        shape = list(tensor.spec.shape)
        if not tensor.spec.requires_grad or len(shape) <= self.dim + 1 or shape[self.dim] % self.num_ranks:
            return tensor  # sent whole: it has no gradient, or does not divide
        shape[self.dim] //= self.num_ranks
        return replace(tensor, spec=replace(tensor.spec, shape=tuple(shape)), in_pieces=True)


class PassSwitch:
    """The pass that runs now, if any, shared by the units of a rank."""

    def __init__(self) -> None:
        self.running: StagePass | None = None


class StagePass:
    """Decides about every call of a unit in one forward pass of a stage.

    Args:
        received: the tensors that crossed the cut before it.
        device: where stand-ins' outputs are made.
        seed: the seed of the pass, the same on every stage of the pipeline.
        pieces: division of tensors that cross cuts in pieces; ``None`` if none do.

    Attributes:
        sent: once the stage has ended, the tensors that cross the cut after it.
        num_calls: the number of calls made so far.
    """

    def __init__(
        self,
        graph: CallGraph,
        stage: StageRange,
        received: Sequence[torch.Tensor],
        *,
        device: torch.device,
        seed: int,
        pieces: CrossingPieces | None = None,
    ) -> None:
        self.sent: tuple[torch.Tensor, ...] | None = None
        self.seed = seed
        self._graph = graph
        self._stage = stage
        self._device = device
        self.num_calls = 0
        self._is_inside = False  # whether a unit runs, whose inner calls are its own
        entries = stage.received.carried if stage.received else ()
        self._pieces = pieces
        self._inputs = {
            (entry.is_argument, entry.call, entry.leaf): pieces.join(tensor)
            if pieces and entry.in_pieces
            else tensor
            for entry, tensor in zip(entries, received, strict=True)
        }
        # Memory of its own, where the code between units may write into a stand-in.
        self._is_dense = graph.mutates or any(entry.is_argument for entry in entries)
        self._exports = {(c.call, c.leaf) for c in _carried_outputs(stage.sent)}  # outputs to send on
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}  # those made so far, by (call, leaf)

    def call(self, path: str, unit: nn.Module | None, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The output of the unit at ``path`` in this pass.

        Args:
            path: path of the unit in the user's model.
            unit: the module, if this rank has it.
            args, kwargs: the arguments that the model's code passes.

        Raises:
            StageEnd: when the first call of the next stage is made.
            StepError: if the model does not make the calls that were traced.
        """
        if self._is_inside and unit is not None:  # called by another unit: part of its call
            return unit(*args, **kwargs)
        number = self._next_call(path)
        if number == self._stage.end:
            self._collect_outgoing(args, kwargs)
            raise StageEnd
        if number < self._stage.begin:  # a call of an earlier stage
            return self._stand_in(number)
        if unit is None:
            raise StepError(f"this rank should run {path}, which it does not have.")
        if number == self._stage.begin:
            self._fill_arguments(args, kwargs)
        # Each call has its own seed, so dropout masks do not depend on the cuts.
        with self._inside_unit(), random_stream(self.seed + number * CALL_STRIDE, self._device):
            output = unit(*args, **kwargs)
        self._keep_outputs(number, output)
        return output

    def call_seeds(self, paths: Sequence[str]) -> tuple[int, ...]:
        """The seeds of consecutive unit calls, of which the first runs now; empty if not consecutive."""
        calls = range(self.num_calls - 1, self.num_calls - 1 + len(paths))
        if [*self._graph.paths[calls.start : calls.stop]] != [*paths]:
            return ()
        return tuple(self.seed + number * CALL_STRIDE for number in calls)

    def _next_call(self, path: str) -> int:
        number = self.num_calls
        paths = self._graph.paths
        if number >= len(paths) or paths[number] != path:
            old_path = paths[number] if number < len(paths) else "its end"
            raise StepError(
                f"the model's forward pass called {path} where it called {old_path} when it was cut into stages. "
                "In a pipeline the calls must be the same for every batch: turn off anything that skips modules at random or by "
                "batch, such as layerdrop, or use another axis."
            )
        self.num_calls += 1
        return number

    @contextmanager
    def _inside_unit(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _stand_in(self, number: int) -> Any:
        places = iter(range(len(self._graph.calls[number].outputs)))

        def make(spec: TensorSignature) -> torch.Tensor:
            tensor = self._inputs.get((False, number, next(places)))
            if tensor is None:
                return _make_zeros(spec, self._device, dense=self._is_dense)
            return tensor.clone() if self._graph.mutates else tensor  # it may be changed in place

        output = map_instances(TensorSignature, make, self._graph.calls[number].output)
        self._keep_outputs(number, output)  # a later stage may need it as well
        return output

    def _fill_arguments(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        tensors = tensors_of((args, kwargs))
        for (is_argument, _, leaf), tensor in self._inputs.items():
            if is_argument:
                stand_in = tensors[leaf]
                if stand_in.requires_grad and not is_view(stand_in):
                    stand_in.detach_()  # from code whose results will not be used
                stand_in.copy_(tensor)  # in place: the code may use it elsewhere too

    def _keep_outputs(self, number: int, output: Any) -> None:
        if not any(call == number for call, _ in self._exports):
            return
        for leaf, tensor in enumerate(tensors_of(output)):
            if (number, leaf) in self._exports:  # as it is now: the next stage changes it in place itself
                self._outputs[number, leaf] = tensor.clone() if self._graph.mutates else tensor

    def _collect_outgoing(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        assert self._stage.sent is not None
        tensors = tensors_of((args, kwargs))
        input_ids = {id(tensor) for tensor in self._inputs.values()}
        crossing = (
            (value, tensors[value.leaf] if value.is_argument else self._outputs[value.call, value.leaf])
            for value in self._stage.sent.carried
        )
        self.sent = tuple(
            _make_sendable(
                self._pieces.divide(tensor) if self._pieces and value.in_pieces else tensor, value, input_ids
            )
            for value, tensor in crossing
        )
        self._outputs.clear()


def _carried_outputs(crossing: Crossing | None) -> list[Carried]:
    return [value for value in crossing.carried if not value.is_argument] if crossing else []


def _make_zeros(spec: TensorSignature, device: torch.device, *, dense: bool) -> torch.Tensor:
    if dense:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape)


def _make_sendable(tensor: torch.Tensor, value: Carried, input_ids: set[int]) -> torch.Tensor:
    """The tensor in the form that was traced: dense, of its dtype, not a view, with a gradient or without."""
    spec = value.spec
    if tuple(tensor.shape) != spec.shape:
        raise StepError(
            f"a stage was to send a tensor of shape {list(spec.shape)} and has one of {list(tensor.shape)}: the "
            "model computes other shapes than when it was traced."
        )
    if not spec.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype != spec.dtype:
        return tensor.to(spec.dtype)
    if not tensor.is_contiguous():
        return tensor.contiguous()
    # The schedules detach what they have sent in place, which views and received tensors must not be.
    if tensor.requires_grad and (is_view(tensor) or id(tensor) in input_ids):
        return tensor.clone()
    return tensor
