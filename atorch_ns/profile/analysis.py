"""Cost analysis: a recording's events summed up for each stretch of the step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from atorch_ns.capture.operators import WEIGHT_PRODUCTS
from atorch_ns.costs.count import is_attention
from atorch_ns.profile.record.recorder import Attention, Event, Recording, backward_of, forward_of
from atorch_ns.profile.record.steps import RecordedStep
from atorch_ns.profile.record.tensor_division import TensorDivision
from atorch_ns.profile.trace import (
    ForwardResult,
    Growth,
    OperatorCost,
    PhaseCost,
    SegmentCost,
    growth,
    values_at,
)

_SOFTMAX = "aten._softmax"


class Divisible(NamedTuple):
    """The divisible parts of one stretch.

    Attributes:
        parameters: fields of the :class:`~atorch_ns.profile.ParameterSpec` of each parameter that tensor
            parallelism divides, by name relative to the block, or full outside blocks.
        fields: fields of :class:`~atorch_ns.profile.Segment`, by name.
    """

    parameters: Mapping[str, Mapping[str, Any]]
    fields: Mapping[str, Any]


def kinds_of(step: RecordedStep, segment_of: Sequence[int], firsts: Sequence[int]) -> list[Divisible]:
    """The divisible parts of each stretch.

    Args:
        segment_of: segment that each recorded stretch belongs to.
        firsts: first recorded stretch of each segment.
    """

    def per_stretch(counts: Mapping[int, int]) -> list[int]:
        total = [0] * len(firsts)
        for phase, count in counts.items():
            total[segment_of[phase // 2]] += count  # phases 2s and 2s + 1 belong to stretch s
        return total

    columns, rows = per_stretch(step.division.columns), per_stretch(step.division.rows)
    attentions = per_stretch(_count_attentions(step))
    fused = _fused_attentions(step, segment_of)
    inside = tuple({f"{call.block}." for call in step.occurrences if call.block})  # prefixes of parameters
    specs = {
        name: {"tensor_dim": dim, "is_vocabulary": name in step.parameters.ends}
        for name, dim in step.parameters.dims.items()
    }
    parts = []
    for number, first in enumerate(firsts):
        block = step.occurrences[first].block
        if block:
            parameters = {
                name.removeprefix(f"{block}."): spec
                for name, spec in specs.items()
                if name.startswith(f"{block}.")
            }
        else:
            parameters = {name: spec for name, spec in specs.items() if not name.startswith(inside)}
        fields = {
            "num_columns": columns[number],
            "num_rows": rows[number],
            "num_attentions": attentions[number],
            "heads": tuple(
                math.gcd(*heads) for heads in zip(*(call[:2] for call in fused[number]), strict=True)
            )
            or (0, 0),
            "head_width": max((call.width for call in fused[number]), default=0),
            "num_queries": max((call.num_queries for call in fused[number]), default=0),
            "is_causal": any(call.is_causal for call in fused[number]),
        }
        parts.append(Divisible(parameters, fields))
    return parts


def _fused_attentions(step: RecordedStep, segment_of: Sequence[int]) -> dict[int, list[Attention]]:
    attentions: dict[int, list[Attention]] = defaultdict(list)
    for event, phase in step.recording.operators():
        if event in step.recording.attentions and phase % 2 == 0:  # forward phases are even
            attentions[segment_of[phase // 2]].append(step.recording.attentions[event])
    return attentions


def _count_attentions(step: RecordedStep) -> dict[int, int]:
    recording = step.recording
    forward = [(event, phase) for event, phase in recording.operators() if phase % 2 == 0]
    fused = Counter(phase for event, phase in forward if is_attention(recording.labels[event]))
    if fused:
        return fused
    # Attention written out: the softmax of a product of activations. A router's is of a product with weights.
    weights = {-1 - number for number in range(len(step.names))} | recording.casts
    scores: set[int] = set()
    counts = Counter[int]()
    for event, phase in forward:
        reads = recording.reads[event]
        if weights.isdisjoint(reads) if recording.sizes[event] else not scores.isdisjoint(reads):
            scores.update(recording.writes[event])
            counts[phase] += recording.labels[event] == _SOFTMAX
    return counts


_FAR = 8
"""Size of the axis ``tensor`` for which the worst moment is found as well."""

_MANY_BATCHES = tuple(2**power for power in range(13))
"""Sizes of a micro-batch, from one sample to more than memory holds."""


@dataclass(frozen=True)
class MeasuredRecording:
    """A recording with its sizes as functions of B and T.

    Attributes:
        sizes: [E, 4] coefficients of each event's bytes or floating point operations.
        moved: [E, 4] coefficients of the bytes that operators move.
        divided: [E, 4] coefficients of moved bytes of tensors that tensor parallelism divides.
        fused: [E, 4] coefficients of bytes that fused kernels move (:func:`kernel_operands`).
        outputs: [S, 4] coefficients of the bytes that each stretch outputs.
        at: B and T of the user's batch, at which the worst moment is found.
        division: tensors and operators that tensor parallelism would divide.
    """

    recording: Recording
    division: TensorDivision
    sizes: np.ndarray
    moved: np.ndarray
    divided: np.ndarray
    fused: np.ndarray
    outputs: np.ndarray
    at: tuple[int, int]


def costs_of(record: MeasuredRecording, segment_of: list[int]) -> list[SegmentCost]:
    """The cost of each segment. ``segment_of`` maps each recorded stretch to its segment, from 0 upwards."""
    recording = record.recording
    num = max(segment_of) + 1
    kinds = np.asarray(recording.kinds)
    phases = _event_phases(recording, segment_of)  # [E]
    alive = _in_three(_alive_bytes, record)  # [3, E, 4]
    lasting = _in_three(lambda *both: _gradients_alive(*both)[0], record)
    passing = _in_three(lambda *both: _gradients_alive(*both)[1], record)
    changes = _in_three(partial(_held_bytes, phases=phases), record)
    costs = []
    for stretch in range(num):
        forward = _Span(record, alive, kinds, np.flatnonzero(phases == forward_of(stretch)))
        backward = _Span(record, alive, kinds, np.flatnonzero(phases == backward_of(stretch)))
        of_backward = replace(
            backward.cost(), peaks_keeping=backward.peaks(lasting), peaks_passing=backward.peaks(passing)
        )
        costs.append(
            SegmentCost(
                forward=forward.cost(),
                backward=of_backward,
                saved=_growth_of_rows(forward.net, record.at),
                output=growth(record.outputs[segment_of.index(stretch)]),
                held=_growth_of_rows(changes[:, phases == forward_of(stretch)].sum(axis=1), record.at),
                kept=_growth_of_rows(forward.net + backward.net, record.at),
                cast_parameters=_cast_bytes(recording, record.sizes, forward.events),
                operators=_operator_costs(record, np.concatenate([forward.events, backward.events])),
                results=_forward_results(record, forward.events),
            )
        )
    return costs


class _Span:
    """The events of one phase. Bytes are [3, E, 4]: all, divided by tensor parallelism, from head to loss."""

    def __init__(
        self, record: MeasuredRecording, alive: np.ndarray, kinds: np.ndarray, events: np.ndarray
    ) -> None:
        self.events = events
        self._record = record
        self._operators = events[kinds[events] == Event.OPERATOR]
        first = int(events[0]) if events.size else 0  # the event that changes the phase
        self.before = alive[:, first - 1] if first else np.zeros((3, 4))  # [3, 4], when the phase begins
        self._changes = alive[:, events] - self.before[:, None]  # [3, events of the phase, 4]
        self.net = self._changes[:, -1] if events.size else np.zeros((3, 4))

    def cost(self) -> PhaseCost:
        record, events = self._record, self._operators
        flops, traffic, at = record.sizes[events], record.moved[events], record.at
        other = ~flops.any(axis=1)  # operators other than products
        fused = np.asarray([is_attention(record.recording.labels[event]) for event in events], dtype=bool)
        is_divided = np.isin(events, list(record.division.operators))  # those of which a rank computes a part
        words = np.isin(events, list(record.division.word_operators)) & ~is_divided

        def bytes_of(mask: np.ndarray, all_bytes: np.ndarray) -> Growth:
            inside = np.minimum(record.divided[events], all_bytes)[mask].sum(axis=0)
            return growth(all_bytes[mask].sum(axis=0), inside, at, all_bytes[mask & words].sum(axis=0))

        return PhaseCost(
            flops=growth(flops.sum(axis=0), flops[is_divided].sum(axis=0), at),
            attention=growth(flops[fused].sum(axis=0), flops[fused & is_divided].sum(axis=0), at),
            operands=bytes_of(~other & ~fused, traffic),
            moved=bytes_of(other, traffic),
            fused=bytes_of(other, record.fused[events]),
            num_operators=len(self._operators),
            peak=self._peak_growth(),
            peaks=self.peaks(),
        )

    def peaks(self, gradients: np.ndarray | None = None) -> tuple[Growth, ...]:
        """The worst moments for some B, T and divisions, including bytes of gradients if given."""
        if not self.events.size:
            return ()
        alive = self._changes
        if gradients is not None:
            first = int(self.events[0])
            before = gradients[:, first - 1, None] if first else 0.0
            alive = alive + gradients[:, self.events] - before
        num_tokens = self._record.at[1]
        # Where sizes grow with T, from an eighth of the traced T to 64 times that.
        lengths = [num_tokens * 2.0**step for step in range(-3, 7)] if alive[0, :, 2:].any() else [num_tokens]
        divisible = [alive[1], alive[1] + alive[2]] if alive[2].any() else [alive[1]]
        # Whole tensors; with the divided ones at an eighth; with those from head to loss at an eighth too.
        divisions = [alive[0], *(alive[0] - (1 - 1 / _FAR) * parts for parts in divisible if parts.any())]
        worst = {  # each moment once
            int(values_at(rest, num_samples, length).argmax()): None
            for rest in divisions
            for num_samples in _MANY_BATCHES
            for length in lengths
        }
        return tuple(_growth_of_rows(alive[:, index], self._record.at) for index in worst)

    def _peak_growth(self) -> Growth:
        if not self.events.size:
            return Growth()
        num_samples, num_tokens = self._record.at
        whole, part, words = self._changes
        worst = int(values_at(whole, num_samples, num_tokens).argmax())
        if whole[:, 2:].any():  # sizes grow with T: the moment that is the worst at the traced sizes
            return _growth_of_rows(self._changes[:, worst], self._record.at)
        # Else the peak is convex in B: the line through B = 1 and the user's B is never below it between.
        far = max(num_samples, 2)
        at_one = max(float(values_at(whole, 1, 1).max()), 0.0)
        at_far = max(float(values_at(whole, far, 1).max()), 0.0)
        slope = (at_far - at_one) / (far - 1)
        line = np.asarray([at_one - slope, slope, 0.0, 0.0])
        return growth(line, part[worst], self._record.at, words[worst])


def divided_operands(recording: Recording, division: TensorDivision) -> list[tuple[bool, ...]]:
    """Whether a rank along ``tensor`` has a part of each tensor of each event, inputs first."""
    marks = division.storages | {-1 - number for number in division.dims}
    for event, label in enumerate(recording.labels):
        if label == "aten._to_copy" and recording.reads[event][0] in marks:
            marks.update(recording.writes[event])  # autocast's copy of a part is a part
    return [
        tuple(mark in marks for mark in _event_marks(recording, event))
        for event in range(len(recording.kinds))
    ]


def kernel_operands(recording: Recording) -> list[tuple[bool, ...]]:
    """Whether each event's tensors, inputs first, move to or from memory if all between two products, or to
    the end of a phase, is one kernel: what it has not made itself, once, and what others read."""
    regions, readers = _kernel_regions(recording), defaultdict(set)
    for event, region in regions.items():
        for mark in recording.reads[event]:
            readers[mark].add(region)
    there: set[tuple[int, int]] = set()  # marks that a region has in registers
    region_writes: set[tuple[int, int]] = set()  # and that it has written
    marks_with_values: set[int] = set()  # what is read before that has no values
    masks = []
    for event in range(len(recording.kinds)):
        if event not in regions:
            masks.append((False,) * len(recording.moved[event]))
            continue
        region, mask = regions[event], []
        for mark in recording.reads[event]:
            mask.append((mark, region) not in there and (mark < 0 or mark in marks_with_values))
            there.add((mark, region))
        for mark in recording.writes[event]:
            is_first = (mark, region) not in region_writes
            mask.append(is_first and readers.get(mark) != {region})
            region_writes.add((mark, region))
            there.add((mark, region))
            marks_with_values.add(mark)
        masks.append(tuple(mask))
    return masks


def _kernel_regions(recording: Recording) -> dict[int, int]:
    regions, region = {}, 0
    for event, kind in enumerate(recording.kinds):
        is_product = kind == Event.OPERATOR and recording.sizes[event] > 0
        region += is_product or kind == Event.PHASE  # a product or a new phase ends the kernel before it
        if kind == Event.OPERATOR:
            regions[event] = region
        region += is_product  # a product is a kernel by itself
    return regions


def _event_marks(recording: Recording, event: int) -> tuple[int, ...]:
    return (*recording.reads.get(event, ()), *recording.writes.get(event, ()))


def _event_phases(recording: Recording, segment_of: Sequence[int]) -> np.ndarray:
    """[E] the phase of each event, in the segment of its stretch."""
    phases = np.empty(len(recording.kinds), dtype=np.int64)
    current = 0
    for index, (kind, key) in enumerate(zip(recording.kinds, recording.keys, strict=True)):
        if kind == Event.PHASE:
            target = segment_of[key // 2]
            current = backward_of(target) if key % 2 else forward_of(target)
        phases[index] = current
    return phases


def _in_three(of: Callable[[Recording, np.ndarray], np.ndarray], record: MeasuredRecording) -> np.ndarray:
    """[3, E, 4] a figure for all memory, for the divided part, and for the part from head to loss."""
    recording, division = record.recording, record.division
    allocates = np.asarray(recording.kinds) == Event.ALLOCATE
    figures = [of(recording, record.sizes)]
    for storages in (division.storages, division.words - division.storages):
        mask = np.asarray([key in storages for key in recording.keys]) & allocates
        figures.append(of(recording, record.sizes * mask[:, None]))
    return np.stack(figures)


def _growth_of_rows(rows: np.ndarray, at: tuple[float, float]) -> Growth:
    """Growth from [3, 4] coefficients of the total, the divided part and the part from head to loss."""
    return growth(rows[0], rows[1], at, rows[2])


def _alive_bytes(recording: Recording, sizes: np.ndarray) -> np.ndarray:
    """[E, 4] bytes alive after each event, without gradients of parameters and casts of them."""
    left_out = recording.gradients | recording.casts
    change = np.zeros_like(sizes)
    allocations: dict[int, int] = {}
    for index, (kind, key) in enumerate(zip(recording.kinds, recording.keys, strict=True)):
        if kind > Event.FREE or key in left_out:  # operators and phases
            continue
        if kind == Event.ALLOCATE:
            allocations[key] = index
            change[index] = sizes[index]
        else:
            change[index] = -sizes[allocations[key]]
    return np.cumsum(change, axis=0)


def _held_bytes(recording: Recording, sizes: np.ndarray, *, phases: np.ndarray) -> np.ndarray:
    """[E, 4] changes of bytes that one forward stretch allocates and a later one frees unread."""
    change = np.zeros_like(sizes)
    allocations: dict[int, int] = {}
    read: dict[int, int] = {}  # the phase that read each storage last
    for index, (kind, key) in enumerate(zip(recording.kinds, recording.keys, strict=True)):
        if kind == Event.ALLOCATE:
            allocations[key] = index
        elif kind == Event.OPERATOR:
            read |= dict.fromkeys(recording.reads.get(index, ()), int(phases[index]))
        elif kind == Event.FREE and key not in recording.gradients | recording.casts:
            born, phase = int(phases[allocations[key]]), int(phases[index])
            is_forward = born % 2 == phase % 2 == 0
            if is_forward and born < phase and read.get(key, born) == born:
                change[allocations[key]] += sizes[allocations[key]]
                change[index] -= sizes[allocations[key]]
    return change


def _gradients_alive(recording: Recording, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[E, 4] bytes of parameter gradients after each event: if kept to the end, and if passed on at once."""
    lasting, passing = np.zeros_like(sizes), np.zeros_like(sizes)
    waiting: list[int] = []
    for index, (kind, key) in enumerate(zip(recording.kinds, recording.keys, strict=True)):
        if kind == Event.OPERATOR:
            passing[index] = -sizes[waiting].sum(axis=0)  # the next operator runs: they are gone
            waiting.clear()
        elif kind == Event.ALLOCATE and key in recording.gradients:
            lasting[index] = passing[index] = sizes[index]
            waiting.append(index)
    return np.cumsum(lasting, axis=0), np.cumsum(passing, axis=0)


def _cast_bytes(recording: Recording, sizes: np.ndarray, events: np.ndarray) -> int:
    casts = [
        index
        for index in events
        if recording.kinds[index] == Event.ALLOCATE and recording.keys[index] in recording.casts
    ]
    return int(sizes[casts, 0].sum()) if casts else 0  # weights do not grow with B


def _operator_costs(record: MeasuredRecording, events: np.ndarray) -> tuple[OperatorCost, ...]:
    recording = record.recording
    by_name: dict[str, list[int]] = {}
    for index in events:
        if recording.kinds[index] == Event.OPERATOR:
            by_name.setdefault(recording.labels[index], []).append(int(index))
    costs = [
        OperatorCost(
            name=name,
            count=len(indices),
            flops=growth(record.sizes[indices].sum(axis=0)),
            moved=growth(record.moved[indices].sum(axis=0)),
        )
        for name, indices in by_name.items()
    ]

    def dearness(cost: OperatorCost) -> tuple[float, int]:
        # A device does about 100 operations in the time that it moves a byte.
        return float(cost.flops.at(*record.at)) / 100 + float(cost.moved.at(*record.at)), cost.count

    return tuple(sorted(costs, key=dearness, reverse=True))


def _forward_results(record: MeasuredRecording, events: np.ndarray) -> tuple[ForwardResult, ...]:
    recording, division = record.recording, record.division
    allocations = {
        recording.keys[index]: index for index in events if recording.kinds[index] == Event.ALLOCATE
    }
    again = _read_again(recording, events)
    calls: dict[tuple[str, int], list[int]] = {}
    storages: dict[tuple[str, int], list[int]] = {}
    number = 0
    for event in events:
        if recording.kinds[event] != Event.OPERATOR:
            continue
        name = recording.labels[event]
        key = (name, number if name in WEIGHT_PRODUCTS else 0)  # products one by one, others by name
        number += name in WEIGHT_PRODUCTS
        calls.setdefault(key, []).append(int(event))
        storages.setdefault(key, []).extend(
            allocations.pop(storage)
            for storage in recording.writes[event]
            if storage in allocations and storage not in recording.casts
        )
    results = []
    for (name, before), indices in calls.items():
        indices_made = np.asarray(storages[name, before], dtype=np.int64)
        sizes, keys = record.sizes[indices_made], [recording.keys[index] for index in indices_made]
        inside = np.asarray([key in division.storages for key in keys], dtype=bool)
        reread = np.asarray([key in again for key in keys], dtype=bool)
        flops = record.sizes[indices]
        results.append(
            ForwardResult(
                name=name,
                number=before,
                flops=growth(flops.sum(axis=0)),
                moved=growth(record.moved[indices][~flops.any(axis=1)].sum(axis=0)),
                size=growth(sizes.sum(axis=0), sizes[inside].sum(axis=0), record.at),
                read_again=growth(sizes[reread].sum(axis=0), sizes[inside & reread].sum(axis=0), record.at),
            )
        )
    return tuple(results)


def _read_again(recording: Recording, events: np.ndarray) -> set[int]:
    indices, last = {int(event) for event in events}, int(events[-1]) if len(events) else -1
    alive = {recording.keys[event] for event in indices if recording.kinds[event] == Event.ALLOCATE}
    alive -= {recording.keys[event] for event in indices if recording.kinds[event] == Event.FREE}
    operators = list(recording.operators())
    outgoing = {  # to later forward phases
        key
        for event, phase in operators
        if event > last and phase % 2 == 0
        for key in recording.reads.get(event, ())
    }
    # What the pass saves but does not hand on; then backwards, all that this is computed from.
    sources = alive - outgoing
    for event in sorted(indices, reverse=True):
        if sources.intersection(recording.writes.get(event, ())):
            sources.update(recording.reads.get(event, ()))
    return sources
