"""A pipeline's step: what each rank does when, and how much of it is idle."""

from __future__ import annotations

from typing import NamedTuple

from atorch_ns.pipeline import PipelineStep
from atorch_ns.pipeline._actions import Kind

__all__ = ["TimelineBlock", "TimelineInfo", "TimelineRow", "timeline_info"]


class TimelineBlock(NamedTuple):
    """One pass of a micro-batch through a stage.

    Attributes:
        kind: F (forward), B (backward), I (backward for the input) or W (backward for the weights).
        stage: index of the stage.
        micro_batch: index of the micro-batch.
        start, end: seconds from the step's beginning.
        lap: 0 for the first of the rank's stages, 1 for the next, and so on.
    """

    kind: Kind
    stage: int
    micro_batch: int
    start: float
    end: float
    lap: int


class TimelineRow(NamedTuple):
    """One rank of the pipeline.

    Attributes:
        rank: its index along the pipeline.
        stages: the stages it holds.
        blocks: its passes in order.
        busy_seconds: what it computes for.
        idle_share: of the step, what it does not.
        live_micro_batches: the most that each of its stages holds activations of, by stage.
    """

    rank: int
    stages: tuple[int, ...]
    blocks: tuple[TimelineBlock, ...]
    busy_seconds: float
    idle_share: float
    live_micro_batches: tuple[int, ...]


class TimelineInfo(NamedTuple):
    """The step of a pipeline, simulated.

    Attributes:
        schedule: its name.
        num_micro_batches: of the step.
        step_seconds: of the passes, without the optimizer and what data parallelism adds.
        bubble_share: mean idle share of the ranks.
        rows: the ranks.
    """

    schedule: str
    num_micro_batches: int
    step_seconds: float
    bubble_share: float
    rows: tuple[TimelineRow, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of passes that there are, in a fixed order."""
        found = {block.kind for row in self.rows for block in row.blocks}
        every: tuple[Kind, ...] = ("F", "B", "I", "W")
        return tuple(kind for kind in every if kind in found)

    @property
    def num_laps(self) -> int:
        """The most stages that a rank holds."""
        return max(len(row.stages) for row in self.rows)

    def first(self, most: int) -> tuple[TimelineRow, ...]:
        """At most so many rows: evenly chosen ranks, the first and the last among them."""
        last = len(self.rows) - 1
        if last < most:
            return self.rows
        return tuple(self.rows[round(place * last / (most - 1))] for place in range(most))


def timeline_info(step: PipelineStep) -> TimelineInfo:
    """Simulates a step.

    Raises:
        InputError: if the schedule is unknown or cannot run the pipeline.
    """
    timeline = step.timeline()
    live = timeline.live_micro_batches
    rows = []
    for rank, order in enumerate(timeline.orders):
        stages = tuple(sorted({action.stage for action in order}))
        laps = {stage: lap for lap, stage in enumerate(stages)}
        times = zip(order, timeline.starts[rank].tolist(), timeline.ends[rank].tolist(), strict=True)
        rows.append(
            TimelineRow(
                rank=rank,
                stages=stages,
                blocks=tuple(
                    TimelineBlock(*action, start, end, laps[action.stage]) for action, start, end in times
                ),
                busy_seconds=timeline.busy_seconds[rank],
                idle_share=timeline.idle_shares[rank],
                live_micro_batches=tuple(live[stage] for stage in stages),
            )
        )
    return TimelineInfo(
        step.schedule, step.num_micro_batches, timeline.step_seconds, timeline.bubble_share, tuple(rows)
    )
