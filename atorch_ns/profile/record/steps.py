"""Recording one training step of a copy of the model, in each precision.

Legend: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.nests import floats_to, samples_and_tokens, unique_tensors_of
from atorch_ns.errors import InputError
from atorch_ns.profile.record.recorder import Boundaries, Occurrence, OperatorRecorder, Recording
from atorch_ns.profile.record.tensor_division import ParameterDims, TensorDivision, follow_division
from atorch_ns.profile.trace import precision_key

ALL_PRECISIONS = ("float32", "float32/bfloat16", "bfloat16", "bfloat16/bfloat16")
"""The model's weights, autocast over them, 16-bit weights, and autocast over gathered 16-bit copies."""


def stays_in_fp32(buffer: str) -> bool:
    """Whether a buffer of this name stays fp32 in a cast. Rotary frequencies lose positions in 16 bits.

    transformers keeps them as ``inv_freq``, ``original_inv_freq`` for later changes, and others by layer.
    """
    return buffer.endswith("inv_freq")


@dataclass(frozen=True)
class StepPrecision:
    """One way to run a step.

    Attributes:
        key: precision key, as written by :func:`precision_key`.
        weights: dtype of floating parameters; ``None`` for the model's own dtypes.
        autocast: dtype of matrix products under autocast.
    """

    key: str
    weights: torch.dtype | None
    autocast: torch.dtype | None

    @classmethod
    def parse(cls, key: str) -> StepPrecision:
        """The precision of a key; for weights in fp32 the model's own dtypes are left alone."""
        weights, _, autocast = key.partition("/")
        return cls(
            precision_key(weights, autocast or None),
            None if weights == "float32" else getattr(torch, weights),
            getattr(torch, autocast) if autocast else None,
        )

    @property
    def casts_buffers(self) -> bool:
        """Whether buffers are cast with the parameters, as ``half`` does but sharding does not."""
        return self.weights is not None and self.autocast is None

    def dtype_of(self, kind: str, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of a parameter (``kind`` is ``"parameter"``), a buffer (its name) or another tensor."""
        if self.weights is None or not tensor.is_floating_point():
            return tensor.dtype
        if kind == "parameter" or (self.casts_buffers and kind != "plain" and not stays_in_fp32(kind)):
            return self.weights
        return tensor.dtype

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """The context of the forward pass and the loss."""
        return nullcontext() if self.autocast is None else torch.autocast(device_type, self.autocast)

    def install(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Adds the hooks that cast inputs and outputs of the model.

        With 16-bit weights the model's inputs are cast, under sharding with mixed precision those of each
        unit too; with ``half`` the loss is given outputs in fp32.
        """
        if self.weights is None:
            return
        for module in {id(module): module for module in (model, *blocks.values())}.values():
            if module is model or not self.casts_buffers:  # sharding casts the inputs of each unit
                module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True, prepend=True)
        if self.casts_buffers:
            model.register_forward_hook(lambda _, __, output: floats_to(output, torch.float32))

    def _cast_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self.weights is not None
        return floats_to(args, self.weights), floats_to(kwargs, self.weights)


ForwardLoss = Callable[[nn.Module, Any], torch.Tensor]
"""``(model, batch) -> loss``: calls the model in the user's format, and the loss function."""


def call_alone(forward_loss: ForwardLoss) -> Callable[[nn.Module, Any], Any]:
    """``(model, batch) -> outputs``: all outputs of the model, even those that the loss does not read.

    The model is changed: a hook stays.
    """

    def run(model: nn.Module, batch: Any) -> Any:
        outputs: list[Any] = []
        model.register_forward_hook(lambda _, __, output: outputs.append(output))
        return forward_loss(model, batch), outputs

    return run


@dataclass(frozen=True)
class TracedModel:
    """The model and batch that are traced, as the user gave them. Never changed.

    Attributes:
        model, batch, forward_loss: the model, on any device; one sample batch; model call and loss.
        sizes: B and T of the batch.
        at: B and T at which memory peaks are found.
        blocks: the repeated blocks, by path; none to follow the model as a whole.
        fingerprints: fingerprints of the blocks, by path.
        keeps_output: whether the model's output is held through the backward pass, as the variable of a
            training loop holds it.
        counts_workspaces: whether memory that kernels take and return inside one call is counted: not where
            another device's kernels stand for those of the requested device.
    """

    model: nn.Module
    batch: Any
    forward_loss: ForwardLoss
    sizes: tuple[int, int]
    at: tuple[int, int]
    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    keeps_output: bool = False
    counts_workspaces: bool = True


@dataclass(frozen=True)
class ModuleCall:
    """The first call of a module: nests of fake or real tensors and plain values."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step.

    Attributes:
        occurrences: the stretches of its forward pass: blocks and the code between them.
        uses: forward stretches, in order, that use each parameter outside blocks, by first name.
        sizes: B and T of the step.
        names: first names of the parameters, which are the first of the given tensors.
        parameters: the parameters that tensor parallelism would divide.
        division: tensors and operators that it would divide.
    """

    recording: Recording
    occurrences: list[Occurrence]
    uses: Mapping[str, list[int]]
    sizes: tuple[int, int]
    names: tuple[str, ...]
    parameters: ParameterDims = field(default_factory=ParameterDims)
    division: TensorDivision = field(default_factory=TensorDivision)

    def with_division(self, parameters: ParameterDims) -> RecordedStep:
        """The step with the tensors and operators that are divided if these parameters are."""
        numbers = {name: number for number, name in enumerate(self.names)}
        dims = {numbers[name]: dim for name, dim in parameters.dims.items()}
        ends = {numbers[name] for name in parameters.ends}
        return replace(self, parameters=parameters, division=follow_division(self.recording, dims, ends))

    def worked(self) -> list[bool]:
        """Whether each stretch ran an operator, forward or backward."""
        flags = [False] * len(self.occurrences)
        for _, phase in self.recording.operators():
            flags[phase // 2] = True
        return flags

    def used(self) -> list[bool]:
        """Whether each stretch used a parameter that belongs to no block."""
        flags = [False] * len(self.occurrences)
        for stretches in self.uses.values():
            for stretch in stretches:
                flags[stretch] = True
        return flags


def record_step(
    subject: TracedModel,
    model: nn.Module,
    batch: Any,
    precision: StepPrecision,
    *,
    block_paths: Sequence[str],
    device_type: str,
) -> RecordedStep:
    """Records one forward and backward pass. ``model`` is changed, since hooks stay.

    Args:
        model: a copy of its model, with its weights in the dtype of ``precision``.
        batch: a batch on the device of the copy.
        block_paths: the repeated blocks of the copy.
        device_type: the type of the device that autocast is for.
    """
    blocks = {path: model.get_submodule(path) for path in block_paths}
    parameters = dict(model.named_parameters())
    outputs: list[Any] = []
    if subject.keeps_output:
        model.register_forward_hook(lambda _, __, output: outputs.append(output))
    precision.install(model, blocks)
    # Parameters first: their numbers are their places among the parameters.
    tensors = [*parameters.values(), *model.buffers(), *unique_tensors_of(batch)]
    recorder = OperatorRecorder(tensors, parameters.values(), counts_workspaces=subject.counts_workspaces)
    boundaries = Boundaries(recorder, blocks)
    with torch.enable_grad(), recorder.running(), boundaries.watching():
        with precision.context(device_type):
            loss = subject.forward_loss(model, batch)
        _check_loss(loss)
        boundaries.start_backward()
        if loss.requires_grad:  # not where all is frozen
            loss.backward()
    for parameter in parameters.values():
        parameter.grad = None
    inside = tuple(f"{path}." for path in block_paths)
    uses = {
        name: [phase // 2 for phase in recorder.recording.uses.get(number, []) if phase % 2 == 0]
        for number, name in enumerate(parameters)
        if not name.startswith(inside)
    }
    return RecordedStep(
        recorder.recording, boundaries.occurrences, uses, samples_and_tokens(batch), tuple(parameters)
    )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(f"the loss must be a tensor of one number to trace a training step; it is {shape}.")
