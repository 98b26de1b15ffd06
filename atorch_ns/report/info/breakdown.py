"""Predicted memory and time of candidates in parts, and the timeline of a pipeline's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from atorch_ns.estimate import Estimate, MemoryParts, TimeParts
from atorch_ns.pipeline import PipelineStep
from atorch_ns.pipeline.schedule.actions import PassKind
from atorch_ns.report.info.candidates import ReportedNumber, peak, seconds
from atorch_ns.search import Row, SearchOutcome


class Bar(NamedTuple):
    """One candidate's predicted parts and its measurement.

    Attributes:
        key, label: key and label of the candidate.
        number: number of its line in the table of candidates.
        is_best, is_baseline: whether it won; whether it is the baseline.
        parts: predicted bytes or seconds, in the order of ``MemoryParts`` or ``TimeParts``.
        measured: ``None`` if it was not tried or failed.
        note: moment of the step at which memory peaks.
    """

    key: str
    label: str
    number: int
    is_best: bool
    is_baseline: bool
    parts: tuple[float, ...]
    measured: ReportedNumber | None
    note: str = ""

    @property
    def predicted(self) -> float:
        """The sum of the parts."""
        return sum(self.parts)


class MemoryInfo(NamedTuple):
    """Peak bytes per rank, in parts, against the limit.

    Attributes:
        names: names of the parts.
        bars: bars of candidates, the winner first.
        limit_bytes: bytes that one rank may use; 0 if unknown.
    """

    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    limit_bytes: int

    def over(self, bar: Bar) -> float:
        """Bytes over the limit, with tensors as measured if they were; negative if the candidate fits."""
        if bar.measured is None or bar.measured.value is None:
            return bar.predicted - self.limit_bytes
        # Trials count tensors. The allocator's cache and memory outside the allocator are predicted.
        return bar.measured.value + sum(bar.parts[self.names.index("reserve") :]) - self.limit_bytes


class TimeInfo(NamedTuple):
    """Seconds per step, in parts.

    Attributes:
        names, bars: as in :class:`MemoryInfo`.
    """

    names: tuple[str, ...]
    bars: tuple[Bar, ...]


def memory_info(outcome: SearchOutcome, *, limit: int = 12) -> MemoryInfo:
    """Memory of the first ``limit`` candidates worth showing; the winner and the baseline always are."""
    bars = _build_bars(outcome, limit, lambda estimate: estimate.memory, peak)
    return MemoryInfo(MemoryParts._fields, bars, outcome.setting.memory_limit_bytes)


def time_info(outcome: SearchOutcome, *, limit: int = 12) -> TimeInfo:
    """Step time of the first ``limit`` candidates worth showing."""
    return TimeInfo(TimeParts._fields, _build_bars(outcome, limit, lambda estimate: estimate.time, seconds))


def used_parts(info: MemoryInfo | TimeInfo) -> list[int]:
    """Indices of the parts that any bar has."""
    return [part for part in range(len(info.names)) if any(bar.parts[part] for bar in info.bars)]


def _build_bars(
    outcome: SearchOutcome,
    limit: int,
    parts: Callable[[Estimate], Sequence[float]],
    figure: Callable[[Row], ReportedNumber],
) -> tuple[Bar, ...]:
    bars = []
    for number, row in _worth_showing(outcome, limit):
        candidate, estimate, best_known = row.candidate, row.candidate.estimate, figure(row)
        if estimate is not None:
            bar = Bar(
                key=candidate.key,
                label=candidate.label,
                number=number,
                is_best=candidate.key == outcome.best,
                is_baseline=candidate.is_baseline,
                parts=tuple(parts(estimate)),
                measured=best_known if best_known.source == "measured" else None,
                note=estimate.peak_at,
            )
            bars.append(bar)
    return tuple(bars)


def _worth_showing(outcome: SearchOutcome, limit: int) -> list[tuple[int, Row]]:
    # Winner and baseline, then tried candidates, then untried ones that fit, then those that do not fit.
    order = {"won": 0, "lost": 1, "failed": 1, "untried": 2, "pruned": 3}

    def rank(pair: tuple[int, Row]) -> tuple[int, int]:
        number, row = pair
        if row.candidate.key == outcome.best:
            return (-2, number)
        if row.candidate.is_baseline:
            return (-1, number)
        kind = row.candidate.pruned.kind if row.candidate.pruned else ""  # same, impossible: last
        return (order[row.fate] + (2 if kind in ("same", "impossible") else 0), number)

    first_rows = sorted(enumerate(outcome.rows, 1), key=rank)[:limit]
    return sorted(first_rows, key=lambda pair: pair[0])  # as in the table


class TimelineBlock(NamedTuple):
    """One pass of a micro-batch through a stage.

    Attributes:
        kind: F (forward), R (recomputation), B (backward), I (backward for the input) or W (for the weights).
        stage, micro_batch: their indices.
        start, end: seconds from the step's beginning.
        lap: 0 for the first of the rank's stages, 1 for the next, and so on.
    """

    kind: PassKind
    stage: int
    micro_batch: int
    start: float
    end: float
    lap: int


class TimelineRow(NamedTuple):
    """One rank of the pipeline.

    Attributes:
        rank: index along the pipeline.
        stages: stages that it holds.
        blocks: its forward and backward passes, in order.
        busy_seconds, idle_share: seconds that it computes; idle share of the step.
        live_micro_batches: the most micro-batches whose activations it holds at once, by stage.
    """

    rank: int
    stages: tuple[int, ...]
    blocks: tuple[TimelineBlock, ...]
    busy_seconds: float
    idle_share: float
    live_micro_batches: tuple[int, ...]


class TimelineInfo(NamedTuple):
    """The step of a pipeline, simulated or measured.

    Attributes:
        schedule: name of the schedule.
        num_micro_batches: micro-batches of a step.
        step_seconds: seconds of the forward and backward passes, without the optimizer and data parallelism.
        bubble_share: mean idle share of the ranks.
        rows: the ranks.
        measured: whether the times were measured.
    """

    schedule: str
    num_micro_batches: int
    step_seconds: float
    bubble_share: float
    rows: tuple[TimelineRow, ...]
    measured: bool = False

    @property
    def kinds(self) -> tuple[PassKind, ...]:
        """The kinds of passes that there are, in a fixed order."""
        letters = {block.kind for row in self.rows for block in row.blocks}
        every: tuple[PassKind, ...] = ("F", "R", "B", "I", "W")
        return tuple(kind for kind in every if kind in letters)

    @property
    def num_laps(self) -> int:
        """The most stages that a rank holds."""
        return max(len(row.stages) for row in self.rows)

    def first(self, most: int) -> tuple[TimelineRow, ...]:
        """At most ``most`` rows: evenly spaced ranks, the first and the last included."""
        last = len(self.rows) - 1
        if last < most:
            return self.rows
        return tuple(self.rows[round(index * last / (most - 1))] for index in range(most))


def timeline_info(step: PipelineStep) -> TimelineInfo:
    """Simulates a step.

    Raises:
        InputError: if the schedule is unknown or cannot run the pipeline.
    """
    timeline = step.timeline()  # simulated
    live = timeline.live_micro_batches
    rows = []
    for rank, order in enumerate(timeline.orders):
        stages = tuple(sorted({action.stage for action in order}))
        laps = {stage: lap for lap, stage in enumerate(stages)}  # order of the rank's stages
        times = zip(order, timeline.starts[rank].tolist(), timeline.ends[rank].tolist(), strict=True)
        row = TimelineRow(
            rank=rank,
            stages=stages,
            blocks=tuple(TimelineBlock(*act, start, end, laps[act.stage]) for act, start, end in times),
            busy_seconds=timeline.busy_seconds[rank],
            idle_share=timeline.idle_shares[rank],
            live_micro_batches=tuple(live[stage] for stage in stages),
        )
        rows.append(row)
    return TimelineInfo(
        step.schedule, step.num_micro_batches, timeline.step_seconds, timeline.bubble_share, tuple(rows)
    )
