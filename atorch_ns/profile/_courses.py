"""Recorded steps of all precisions together: from events to the segments of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from atorch_ns.profile._analysis import Measured, costs_of
from atorch_ns.profile._divisible import kinds_of
from atorch_ns.profile._growths import by_divisor, by_lengths, by_samples
from atorch_ns.profile._segments import build_segments, merge_stretches, unfold
from atorch_ns.profile._steps import Step, Subject
from atorch_ns.profile._trace import Segment
from atorch_ns.profile._truncate import Container

__all__ = ["DifferentCourseError", "segments_of"]


class DifferentCourseError(Exception):
    """Steps that should have run the same operators did not, or blocks did not run as their list has them."""


def segments_of(
    subject: Subject, steps: Mapping[str, Sequence[Step]], containers: Mapping[str, Container]
) -> tuple[Segment, ...]:
    """The segments of the whole model.

    Args:
        subject: what was traced.
        steps: by precision key, one step or more: with one B that tells what grows with it, at one T or at
            three; or with two B at one T.
        containers: those that were shortened.

    Raises:
        DifferentCourseError: if the steps cannot be compared.
    """
    firsts_of_each = [own[0] for own in steps.values()]
    blocks = [occurrence.block for occurrence in firsts_of_each[0].occurrences]
    for step in firsts_of_each:
        if [occurrence.block for occurrence in step.occurrences] != blocks:
            raise DifferentCourseError("the precisions call the blocks in different orders")
    worked = [any(flags) for flags in zip(*(step.worked() for step in firsts_of_each), strict=True)]
    used = [any(flags) for flags in zip(*(step.used() for step in firsts_of_each), strict=True)]
    merged, firsts = merge_stretches(firsts_of_each[0].occurrences, worked, used)
    stretches = unfold(firsts_of_each[0].occurrences, firsts, containers)
    if stretches is None:
        raise DifferentCourseError("blocks of one kind did not run once each, in order, with equal shapes")
    costs = {key: costs_of(_measured(own, subject.at), merged) for key, own in steps.items()}
    uses = {name: [merged[place] for place in places] for name, places in firsts_of_each[0].uses.items()}
    kinds = kinds_of(firsts_of_each[0], merged, firsts)
    return build_segments(subject.model, stretches, costs, subject.prints, uses, kinds)


def _measured(steps: Sequence[Step], at: tuple[int, int]) -> Measured:
    first = steps[0]
    if not all(first.recording.same_course(step.recording) for step in steps[1:]):
        raise DifferentCourseError("the steps with other sizes ran other operators")
    recordings = [step.recording for step in steps]
    return Measured(
        recording=first.recording,
        division=first.division,
        sizes=_coefficients([recording.sizes for recording in recordings], steps, at[0]),
        moved=_sums([recording.moved for recording in recordings], steps, at[0]),
        outputs=_sums([[one.outputs for one in step.occurrences] for step in steps], steps, at[0]),
        at=at,
    )


def _coefficients(values: Sequence[Sequence[int]], steps: Sequence[Step], at: int) -> np.ndarray:
    if len({step.sizes[0] for step in steps}) > 1:
        return by_samples(values, [step.sizes[0] for step in steps])
    each = [by_divisor(own, steps[0].sizes[0], at) for own in values]
    return each[0] if len(steps) == 1 else by_lengths(each, [step.sizes[1] for step in steps])


def _sums(values: Sequence[Sequence[tuple[int, ...]]], steps: Sequence[Step], at: int) -> np.ndarray:
    """Coefficients of sums, found term by term: some terms grow and some do not."""
    terms = _coefficients([[size for group in own for size in group] for own in values], steps, at)
    owners = np.repeat(np.arange(len(values[0])), [len(group) for group in values[0]])
    sums = np.zeros((len(values[0]), 4))
    np.add.at(sums, owners, terms)
    return sums
