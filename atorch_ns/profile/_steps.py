"""One recorded step of a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.profile._batches import batch_sizes
from atorch_ns.profile._boundaries import Boundaries, Occurrence, tensors_in
from atorch_ns.profile._counts import vocabulary_size
from atorch_ns.profile._division import Division, find_division
from atorch_ns.profile._precisions import Precision
from atorch_ns.profile._recorder import Event, Recorder, Recording

__all__ = ["ForwardLoss", "Step", "Subject", "record_step"]

ForwardLoss = Callable[[nn.Module, Any], torch.Tensor]
"""``(model, batch) -> loss``: calls the model in the user's format, and the loss function."""


@dataclass(frozen=True)
class Subject:
    """What is traced, as the user gave it. Never changed.

    Attributes:
        model: the model, on any device.
        batch: one sample batch.
        forward_loss: its model call and loss.
        blocks: the repeated blocks, by path.
        prints: their fingerprints.
        sizes: B and T of the batch.
        at: B and T whose worst moments matter.
        keeps_output: whether the model's output is held through the backward pass, as the variable of a
            training loop holds it.
    """

    model: nn.Module
    batch: Any
    forward_loss: ForwardLoss
    blocks: Mapping[str, nn.Module]
    prints: Mapping[str, str]
    sizes: tuple[int, int]
    at: tuple[int, int]
    keeps_output: bool = False


@dataclass(frozen=True)
class Step:
    """What one step did.

    Attributes:
        recording: the events.
        occurrences: the stretches of its forward pass, blocks and what runs between them.
        uses: for each parameter outside blocks, by its first name, the stretches that use it in the forward
            pass, in order.
        sizes: B and T that it ran with.
        division: what of it tensor parallelism would divide.
        dims: for each parameter that would be divided, by its first name, the dim.
    """

    recording: Recording
    occurrences: list[Occurrence]
    uses: Mapping[str, list[int]]
    sizes: tuple[int, int]
    division: Division
    dims: Mapping[str, int]

    def worked(self) -> list[bool]:
        """For each stretch whether it ran an operator, forward or backward."""
        found = [False] * len(self.occurrences)
        stretch = 0
        for kind, key in zip(self.recording.kinds, self.recording.keys, strict=True):
            if kind == Event.PHASE:
                stretch = key // 2
            elif kind == Event.OPERATOR:
                found[stretch] = True
        return found

    def used(self) -> list[bool]:
        """For each stretch whether it used a parameter that belongs to no block."""
        found = [False] * len(self.occurrences)
        for stretches in self.uses.values():
            for stretch in stretches:
                found[stretch] = True
        return found


def record_step(
    subject: Subject,
    model: nn.Module,
    batch: Any,
    precision: Precision,
    block_paths: Sequence[str],
    *,
    device_type: str,
) -> Step:
    """Runs forward and backward pass once and records it. ``model`` is changed: hooks stay.

    Args:
        subject: what is traced.
        model: a copy of its model, with its weights in the dtype of ``precision``.
        batch: a batch on the device of the copy.
        precision: how the step runs.
        block_paths: the repeated blocks of the copy.
        device_type: of autocast.
    """
    blocks = {path: model.get_submodule(path) for path in block_paths}
    parameters = dict(model.named_parameters())
    held: list[Any] = []
    if subject.keeps_output:
        model.register_forward_hook(lambda _, __, output: held.append(output))
    precision.install(model, blocks)
    given = [*parameters.values(), *model.buffers(), *tensors_in(batch)]
    recorder = Recorder(given, parameters.values())
    boundaries = Boundaries(recorder, blocks)
    with torch.enable_grad(), recorder.running(), boundaries.watching():
        with precision.context(device_type):
            loss = subject.forward_loss(model, batch)
        _check_loss(loss)
        boundaries.start_backward()
        if loss.requires_grad:
            loss.backward()
    for parameter in parameters.values():
        parameter.grad = None
    inside = tuple(f"{path}." for path in block_paths)
    uses = {
        name: [phase // 2 for phase in recorder.recording.uses.get(number, []) if phase % 2 == 0]
        for number, name in enumerate(parameters)
        if not name.startswith(inside)
    }
    division = _division(model, recorder.recording, boundaries.occurrences, inside)
    dims = {name: division.dims[number] for number, name in enumerate(parameters) if number in division.dims}
    return Step(recorder.recording, boundaries.occurrences, uses, batch_sizes(batch), division, dims)


def _division(
    model: nn.Module, recording: Recording, occurrences: Sequence[Occurrence], inside: tuple[str, ...]
) -> Division:
    words = vocabulary_size(model)
    parameters = dict(model.named_parameters())
    vocabulary = {
        number: 0
        for number, (name, parameter) in enumerate(parameters.items())
        if words > 1
        and not name.startswith(inside)
        and parameter.dim()
        and parameter.shape[0] == words
        and not _is_of_positions(name)
    }
    shapes = [tuple(parameter.shape) for parameter in parameters.values()]
    return find_division(recording, shapes, lambda phase: occurrences[phase // 2].block, vocabulary)


def _is_of_positions(name: str) -> bool:
    """Whether a table has a row for each position, which may be as many as words."""
    table = name.rpartition(".")[0].rpartition(".")[2].lower()
    return "pos" in table or table == "wpe"


def _check_loss(loss: Any) -> None:
    """Refuses what is no scalar tensor."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(f"the loss must be a tensor of one number to trace a training step; it is {shape}.")
