"""Tracing: a profile with the cost of one training step, found without running the user's model."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import (
    NamedModule,
    experts_per_token,
    fingerprints,
    num_experts,
    num_heads,
    num_key_value_heads,
    repeated_blocks,
    vocabulary_size,
)
from atorch_ns.capture.nests import samples_and_tokens, unique_tensors_of
from atorch_ns.capture.random_states import caches_off, random_states_kept
from atorch_ns.capture.structure import Container, copy_structure, truncate
from atorch_ns.errors import InputError
from atorch_ns.profile.optimizer import optimizer_spec
from atorch_ns.profile.profile import Profile
from atorch_ns.profile.record.fake_steps import FakeSteps, record_real
from atorch_ns.profile.record.steps import (
    ALL_PRECISIONS,
    ForwardLoss,
    RecordedStep,
    StepPrecision,
    TracedModel,
    call_alone,
)
from atorch_ns.profile.record.tensor_division import Divide, ParameterDims
from atorch_ns.profile.segments import DifferentEventsError, segments_of
from atorch_ns.profile.trace import Growth, Segment, Trace
from atorch_ns.text import error_line

_log = logging.getLogger(__name__)

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193)


@dataclass(frozen=True)
class Traced:
    """The outcome of an attempt to trace a model.

    Attributes:
        segments: the segments of the whole model, with costs.
        how: ``"fake"`` or ``"real"``.
        notes: assumptions, as sentences.
        loss_share: as in :class:`Trace`.
    """

    segments: tuple[Segment, ...]
    how: str = "fake"
    notes: tuple[str, ...] = ()
    loss_share: float = 1.0


class TraceFallbacks:
    """Traces a model in one of several ways.

    On fake tensors with shortened lists of blocks; with all blocks; with the batch's own B, for models that
    take no other; or one real step.

    Args:
        device: the device that fake tensors claim to be on.
        divide: finds the parameters that tensor parallelism divides.
    """

    def __init__(
        self, subject: TracedModel, precisions: Sequence[StepPrecision], device: str, divide: Divide
    ) -> None:
        self._subject = subject
        self._precisions = precisions
        self._device = device
        self._divide = divide
        self._dims: dict[tuple[str, ...], ParameterDims] = {}  # by what is shortened

    def best(self, sequence: bool) -> Traced:
        """The first attempt that works.

        Args:
            sequence: whether to find costs as functions of T too.

        Raises:
            InputError: if the model or the loss raises in a real step too, or the model has no values to
                take one with.
        """
        prime, batch_size = self._prime_batch_size(), self._subject.sizes[0]
        reason: Exception | None = None
        # The cheapest way first: few blocks, all blocks, the batch's own B for models that take no other.
        for is_short, num_samples in ((True, prime), (False, prime), (False, batch_size)):
            try:
                outcome = self._trace_fake_steps(is_short, num_samples, self._sequence_lengths(1))
            except Exception as error:  # whatever the user's code raises on fake tensors
                reason = reason or error  # the first failure is reported
                continue
            if num_samples != prime:
                outcome = replace(outcome, notes=(*outcome.notes, _fixed_batch(batch_size)))
            return self._with_lengths(outcome, is_short, num_samples, sequence)
        assert reason is not None
        return self._trace_real_steps(reason)

    def _trace_fake_steps(self, is_short: bool, num_samples: int, lengths: Sequence[int]) -> Traced:
        subject = self._subject
        containers = truncate(subject.model, subject.blocks, subject.fingerprints) if is_short else {}
        fakes = FakeSteps(subject, containers, self._device)
        steps, notes = self._in_each_precision(
            lambda precision: [fakes.record(precision, (num_samples, length)) for length in lengths],
            containers,
        )
        first = steps[self._precisions[0].key][0]
        return Traced(
            segments_of(subject, steps, containers), notes=notes, loss_share=first.division.loss_share
        )

    def _in_each_precision(
        self, record: Callable[[StepPrecision], list[RecordedStep]], containers: Mapping[str, Container]
    ) -> tuple[dict[str, list[RecordedStep]], tuple[str, ...]]:
        first, *others = self._precisions
        steps, notes = {first.key: record(first)}, []  # the first precision must run, others may fail
        for precision in others:
            try:
                steps[precision.key] = record(precision)
            except Exception as error:
                notes.append(f"The model does not run in {precision.key}: {error_line(error)}.")
        parts, reasons = self._with_division(steps, containers)  # last, as it needs a model that runs
        return parts, (*notes, *reasons)

    def _with_division(
        self, steps: dict[str, list[RecordedStep]], containers: Mapping[str, Container]
    ) -> tuple[dict[str, list[RecordedStep]], list[str]]:
        subject, key = self._subject, tuple(containers)
        try:
            if key not in self._dims:  # names do not depend on sizes or precisions
                self._dims[key] = ParameterDims()  # where the search fails, it is not repeated
                model = copy_structure(subject.model, lambda _, tensor: tensor.detach(), containers)
                self._dims[key] = self._divide(model, subject.batch, call_alone(subject.forward_loss))
            dims = self._dims[key]
            return {name: [step.with_division(dims), *rest] for name, (step, *rest) in steps.items()}, []
        except Exception as error:  # the steps have costs without it too
            _log.debug("the division cannot be followed", exc_info=True)
            return steps, [f"Tensor parallelism is taken to divide nothing: {error_line(error)}."]

    def _with_lengths(self, outcome: Traced, is_short: bool, num_samples: int, sequence: bool) -> Traced:
        lengths = self._sequence_lengths(3)
        if not sequence or self._subject.sizes[1] == 1:  # one token: no sequence
            return outcome
        try:
            return self._trace_fake_steps(is_short, num_samples, lengths)
        except Exception as error:  # the user's code again
            note = f"Costs hold for {lengths[0]} tokens only: other lengths cannot be traced ({error_line(error)})."
            return replace(outcome, notes=(*outcome.notes, note))

    def _sequence_lengths(self, count: int) -> tuple[int, ...]:
        tokens = self._subject.sizes[1]
        if count == 1:
            return (tokens,)
        # Shorter ones, since no model runs more tokens than the user gave it. Few tokens have no quarter.
        if tokens < 4:  # a shorter one would be a single token, which is priced as none
            return (tokens, tokens + 1, tokens + 2)
        return (tokens, tokens // 2, tokens // 4) if tokens >= 8 else (tokens, tokens - 1, tokens - 2)

    def _trace_real_steps(self, reason: Exception) -> Traced:
        subject = self._subject
        model = subject.model
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise InputError(
                f"the model cannot be traced on fake tensors ({error_line(reason)}){_error_location(reason)}, and it is on "
                "the meta device, so no real step can be taken. Build it on a device."
            ) from reason
        num_samples = subject.sizes[0]
        pair = (num_samples, num_samples // 2) if num_samples > 1 else (1, 2)  # a line needs two B
        try:
            steps, notes = self._in_each_precision(
                lambda precision: [record_real(subject, precision, count) for count in pair], {}
            )
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"the model or the loss raises on the sample batch: {error_line(error)}{_error_location(error)}. A training "
                "step would raise the same."
            ) from error
        note = (
            f"One real step was profiled, since the model does not run on fake tensors: {error_line(reason)}."
        )
        try:
            return Traced(segments_of(subject, steps, {}), "real", (note, *notes))
        except DifferentEventsError as error:
            single = {key: runs[:1] for key, runs in steps.items()}  # sizes that B divides then grow with B
            other = f"Sizes are taken to grow with the batch where {num_samples} divides them: {error}."
            return Traced(segments_of(subject, single, {}), "real", (note, *notes, other))

    def _prime_batch_size(self) -> int:
        model, batch = self._subject.model, unique_tensors_of(self._subject.batch)
        tensors = (*model.parameters(), *model.buffers(), *batch)
        dims = {size + step for t in tensors for size in t.shape for step in (-1, 0, 1)}
        # No dim, nor a neighbour (a sequence without its last token), is a multiple: multiples grow with B.
        return next((p for p in _PRIMES if not any(dim and dim % p == 0 for dim in dims)), _PRIMES[-1])


def _fixed_batch(num_samples: int) -> str:
    grows = f"every size that is a multiple of {num_samples} is taken to grow with the batch"
    return f"The model runs with batches of {num_samples} only, so {grows}."


def _error_location(error: BaseException) -> str:
    """The place where the user's code raised: the innermost frame outside torch and this package."""
    inner = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inner)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def profile_model(
    model: nn.Module,
    batch: Any,
    forward_loss: ForwardLoss,
    divide: Divide,
    *,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    precisions: Sequence[str] = ALL_PRECISIONS,
    blocks: Sequence[str] | None = None,
    num_samples: int | None = None,
    sequence: bool = False,
    keeps_output: bool = False,
    device: str = "cpu",
) -> Profile:
    """The structure of a model and the cost of one training step, as functions of the batch.

    The step runs on fake tensors, on a copy of the model's structure without memory in which a few blocks
    stand for all that are equal: the time does not grow with the depth. Costs are exact in the number of
    samples B; they hold for the batch's own number of tokens T unless ``sequence`` is set. A model that does
    not run on fake tensors is copied and takes one real step; a note says so. The user's weights, buffers,
    gradients and random states are not touched.

    Args:
        model: the model, on any device, meta too.
        batch: one sample batch, any nest of tensors. The first tensor's dim 0 is B; a [B, T] tensor of
            integers gives T.
        forward_loss: ``(model, batch) -> loss``.
        divide: finds the parameters that tensor parallelism divides: ``atorch_ns.sharding.find_dims``.
        make_optimizer: makes the user's optimizer for parameters; ``None`` where there is none.
        precisions: keys as :func:`precision_key` writes them; "float32" are the weights as they are.
        blocks: paths of the blocks; ``None`` for those that repeat.
        num_samples: the B at which peaks are exact; ``None`` for the batch's.
        sequence: trace three lengths, so that costs are functions of T too. Not the default: it takes three
            times as long, and a plan for the batch at hand needs only B.
        keeps_output: whether the training loop holds the model's output through the backward pass, as one
            written by hand may do; ``train_step`` does not.
        device: type of the device of the step, which decides the kernels. While this process does not use it,
            the CPU's stand in, with a note and without workspaces: tracing never starts a GPU.

    Raises:
        InputError: if the model or the loss raises on the sample batch, really run.
    """
    layers = repeated_blocks(model)
    if blocks is not None:
        layers = [NamedModule(path, model.get_submodule(path)) for path in blocks]
    modules = {block.name: block.module for block in layers}
    sizes = samples_and_tokens(batch)
    usable = "cpu" if _is_unused(device) else device
    subject = TracedModel(
        model=model,
        batch=batch,
        forward_loss=forward_loss,
        blocks=modules,
        fingerprints=fingerprints(modules),
        sizes=sizes,
        at=(num_samples or sizes[0], sizes[1]),
        keeps_output=keeps_output,
        counts_workspaces=usable == device,
    )
    with caches_off(model), random_states_kept(*{parameter.device for parameter in model.parameters()}):
        steps = [StepPrecision.parse(key) for key in precisions]
        outcome = TraceFallbacks(subject, steps, usable, divide).best(sequence)
        spec, optimizer_notes = optimizer_spec(make_optimizer, torch.device(device).type)
    trace = _build_trace(subject, outcome)
    if usable != device:
        optimizer_notes += (f"The CPU's kernels stand for those of {device}, which is not in use here.",)
    return replace(
        Profile.of(model), trace=replace(trace, optimizer=spec, notes=trace.notes + optimizer_notes)
    )


def _is_unused(device: str) -> bool:
    kind = torch.device(device).type
    return kind != "cpu" and not (kind == "cuda" and torch.cuda.is_initialized())  # tracing starts no GPU


def _build_trace(subject: TracedModel, outcome: Traced) -> Trace:
    num_samples, num_tokens = subject.sizes
    rows = [t for t in unique_tensors_of(subject.batch) if t.dim() and t.shape[0] == num_samples]
    others = [t for t in unique_tensors_of(subject.batch) if not t.dim() or t.shape[0] != num_samples]
    per_sample = sum(t.numel() * t.itemsize for t in rows) / max(num_samples, 1)
    return Trace(
        segments=outcome.segments,
        num_samples=subject.at[0],
        num_tokens=num_tokens,
        batch_bytes=Growth(float(sum(t.numel() * t.itemsize for t in others)), per_sample),
        num_heads=num_heads(subject.model),
        num_key_value_heads=num_key_value_heads(subject.model),
        vocabulary_size=vocabulary_size(subject.model),
        loss_share=outcome.loss_share,
        num_experts=num_experts(subject.model),
        experts_per_token=experts_per_token(subject.model),
        how=outcome.how,
        notes=outcome.notes,
    )
