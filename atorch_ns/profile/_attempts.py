"""Ways to trace a model, the cheapest that works first."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from atorch_ns.errors import InputError
from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.profile._courses import DifferentCourseError, segments_of
from atorch_ns.profile._fake_steps import FakeSteps
from atorch_ns.profile._precisions import Precision
from atorch_ns.profile._real_steps import record_real
from atorch_ns.profile._steps import Step, Subject
from atorch_ns.profile._trace import Segment
from atorch_ns.profile._truncate import truncate

__all__ = ["Attempts", "Traced"]

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193)


@dataclass(frozen=True)
class Traced:
    """What an attempt found.

    Attributes:
        segments: of the whole model, with costs.
        how: ``"fake"`` or ``"real"``.
        notes: what was assumed, as sentences.
        loss_share: tokens whose loss is computed, of all that the head computes.
    """

    segments: tuple[Segment, ...]
    how: str = "fake"
    notes: tuple[str, ...] = ()
    loss_share: float = 1.0


class Attempts:
    """Traces a model in one of several ways.

    On fake tensors with shortened lists of blocks; with all blocks; with the batch's own B, for models that
    take no other; or one real step.

    Args:
        subject: what is traced.
        precisions: in which.
        device: that fake tensors claim to be on.
    """

    def __init__(self, subject: Subject, precisions: Sequence[Precision], device: str) -> None:
        self._subject = subject
        self._precisions = precisions
        self._device = device

    def best(self, sequence: bool) -> Traced:
        """The first attempt that works.

        Args:
            sequence: find costs as functions of T too.

        Raises:
            InputError: if the model or the loss raises in a real step too, or the model has no values to
                take one with.
        """
        prime, own = self._prime(), self._subject.sizes[0]
        reason: Exception | None = None
        for truncated, num_samples in ((True, prime), (False, prime), (False, own)):
            try:
                traced = self._fake(truncated, num_samples, self._lengths(1))
            except Exception as error:  # whatever the user's code raises on fake tensors
                reason = reason or error
                continue
            if num_samples != prime:
                traced = replace(traced, notes=(*traced.notes, _fixed_batch(own)))
            return self._with_lengths(traced, truncated, num_samples, sequence)
        assert reason is not None
        return self._real(reason)

    def _fake(self, truncated: bool, num_samples: int, lengths: Sequence[int]) -> Traced:
        subject = self._subject
        containers = truncate(subject.model, subject.blocks, subject.prints).containers if truncated else {}
        fakes = FakeSteps(subject, containers, self._device)
        steps, notes = self._in_each_precision(
            lambda precision: [fakes.record(precision, (num_samples, length)) for length in lengths]
        )
        first = steps[self._precisions[0].key][0]
        return Traced(
            segments_of(subject, steps, containers), notes=notes, loss_share=first.division.loss_share
        )

    def _in_each_precision(
        self, record: Callable[[Precision], list[Step]]
    ) -> tuple[dict[str, list[Step]], tuple[str, ...]]:
        """Steps by precision key. The first precision must run; another that does not is noted."""
        first, *others = self._precisions
        steps, notes = {first.key: record(first)}, []
        for precision in others:
            try:
                steps[precision.key] = record(precision)
            except Exception as error:
                notes.append(f"The model does not run in {precision.key}: {_text(error)}.")
        return steps, tuple(notes)

    def _with_lengths(self, traced: Traced, truncated: bool, num_samples: int, wanted: bool) -> Traced:
        lengths = self._lengths(3)
        if not wanted or self._subject.sizes[1] == 1:
            return traced
        try:
            return self._fake(truncated, num_samples, lengths)
        except Exception as error:  # the user's code again
            note = (
                f"Costs hold for {lengths[0]} tokens only: other lengths cannot be traced ({_text(error)})."
            )
            return replace(traced, notes=(*traced.notes, note))

    def _lengths(self, count: int) -> tuple[int, ...]:
        """The batch's own T, a half and a quarter of it: no model is asked for more than it was shown."""
        tokens = self._subject.sizes[1]
        if count == 1:
            return (tokens,)
        return (tokens, tokens // 2, tokens // 4) if tokens >= 8 else (tokens, tokens + 1, tokens + 2)

    def _real(self, reason: Exception) -> Traced:
        subject = self._subject
        model = subject.model
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise InputError(
                f"the model cannot be traced on fake tensors ({_text(reason)}){_place(reason)}, and it is on "
                "the meta device, so no real step can be taken. Build it on a device."
            ) from reason
        num_samples = subject.sizes[0]
        pair = (num_samples, num_samples // 2) if num_samples > 1 else (1, 2)
        try:
            steps, notes = self._in_each_precision(
                lambda precision: [record_real(subject, precision, count) for count in pair]
            )
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"the model or the loss raises on the sample batch: {_text(error)}{_place(error)}. A training "
                "step would raise the same."
            ) from error
        note = f"One real step was profiled, since the model does not run on fake tensors: {_text(reason)}."
        try:
            return Traced(segments_of(subject, steps, {}), "real", (note, *notes))
        except DifferentCourseError as error:
            single = {key: own[:1] for key, own in steps.items()}
            other = f"Sizes are taken to grow with the batch where {num_samples} divides them: {error}."
            return Traced(segments_of(subject, single, {}), "real", (note, *notes, other))

    def _prime(self) -> int:
        """A B that divides a size only if that size grows with B: no dim of the model or the batch, nor its
        neighbours (a sequence without its last token), is a multiple of it."""
        tensors = (*self._subject.model.parameters(), *self._subject.model.buffers())
        dims = {size + step for t in tensors for size in t.shape for step in (-1, 0, 1)}
        dims |= {
            size + step for t in tensors_in(self._subject.batch) for size in t.shape for step in (-1, 0, 1)
        }
        return next((p for p in _PRIMES if not any(dim and dim % p == 0 for dim in dims)), _PRIMES[-1])


def _fixed_batch(num_samples: int) -> str:
    return (
        f"The model runs with batches of {num_samples} only, so every size that is a multiple of "
        f"{num_samples} is taken to grow with the batch."
    )


def _text(error: BaseException) -> str:
    """The exception's type and the first line of what it says."""
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _place(error: BaseException) -> str:
    """Where the user's code raised: the innermost frame that is neither torch's nor this package's."""
    inner = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inner)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
