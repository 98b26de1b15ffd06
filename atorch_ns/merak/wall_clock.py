"""Wall clock breakdown: measured times of a step's phases and a pipeline's passes on each rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from transformers import TrainerCallback

from atorch_ns.cluster import gather_values
from atorch_ns.job import Result
from atorch_ns.job.train_step import PHASES
from atorch_ns.merak import mpu
from atorch_ns.report.info.breakdown import TimelineBlock, TimelineInfo, TimelineRow
from atorch_ns.report.text.tables import Table, as_text
from atorch_ns.report.text.text import timeline_text
from atorch_ns.text import seconds_text

log = logging.getLogger("atorch_ns")

# By actions of schedules; I and W are the halves of a backward pass, for inputs and for weights.
_PASSES: Final = {"F": "forward", "R": "recompute", "B": "backward", "I": "backward", "W": "backward"}


class _Pass(NamedTuple):
    kind: str
    stage: int
    micro_batch: int
    due: float
    begun: float
    ended: float


class RankTimes(NamedTuple):
    """The times of one rank's last step.

    Attributes:
        phases, passes: seconds of each phase, and a pipeline's passes, in seconds from the step's begin.
    """

    phases: dict[str, float]
    passes: tuple[_Pass, ...]

    @property
    def columns(self) -> dict[str, float]:
        """Seconds by kind. A pipeline's passes and their waiting times replace their phase."""
        if not self.passes:
            return self.phases
        totals = {"forward": 0.0, "recompute": 0.0, "backward": 0.0, "waiting": 0.0}
        for run in self.passes:
            totals[_PASSES[run.kind]] += run.ended - run.begun
            totals["waiting"] += run.begun - run.due
        return {**totals, **{name: s for name, s in self.phases.items() if name != "forward_backward"}}


class WallClock(TrainerCallback):
    """Watches the phases of a job's steps, and logs those of all ranks' last step with metrics.

    Args:
        result: the job. On a GPU each phase waits for the device, which slows steps down.
    """

    def __init__(self, result: Result) -> None:
        self._result = result
        self._seconds: dict[str, float] = {}
        self._began: dict[str, float] = {}
        for phase in PHASES:
            result.train_step.observe(phase, partial(self._begin_phase, phase), when="before")
            result.train_step.observe(phase, partial(self._end_phase, phase))

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gathers and logs the times of the last step. Collective."""
        if not self._seconds:
            return
        every = gather_values(self.times, distributed=self._result.job.cluster.distributed)
        self._seconds = {}
        if self._result.rank == 0:
            log.warning(
                "step %d, wall clock of each rank (measured):\n%s", state.global_step, breakdown_text(every)
            )

    @property
    def times(self) -> RankTimes:
        """Times of this rank's last step."""
        begin = self._began.get("forward_backward", 0.0)
        passes = tuple(
            _Pass(
                entry.action.kind,
                entry.action.stage,
                entry.action.micro_batch,
                entry.due - begin,
                entry.begun - begin,
                entry.ended - begin,
            )
            for entry in self._result.train_step.timeline
        )
        return RankTimes(dict(self._seconds), passes)

    def _begin_phase(self, phase: str) -> None:
        self._began[phase] = self._read_clock()

    def _end_phase(self, phase: str) -> None:
        self._seconds[phase] = self._read_clock() - self._began[phase]

    def _read_clock(self) -> float:
        if self._result.device.type == "cuda":
            torch.cuda.synchronize(self._result.device)  # otherwise launches are timed, not kernels
        return time.perf_counter()


def breakdown_text(every: Sequence[RankTimes]) -> str:
    """A table with a row for each rank, and the timeline of the first pipeline."""
    columns = list(dict.fromkeys(name for times in every for name in times.columns))
    rows = [
        (str(rank), *(seconds_text(times.columns.get(name, 0.0)) for name in columns))
        for rank, times in enumerate(every)
    ]
    text = as_text(Table(("rank", *columns), tuple(rows), frozenset()))
    grid = mpu.get_grid()
    pipeline = [
        grid.get_rank(pipe=index, data=0, sequence=0, model=0) for index in range(grid.get_dim("pipe"))
    ]
    stages = [every[rank].passes for rank in pipeline]  # empty without a pipeline
    return text if not all(stages) else f"{text}\n{timeline_text(measured_timeline(stages))}"


def measured_timeline(ranks: Sequence[Sequence[_Pass]]) -> TimelineInfo:
    """The timeline of a pipeline's step from the passes of its ranks."""
    end = max(run.ended for passes in ranks for run in passes)
    rows = []
    for rank, passes in enumerate(ranks):
        stages = tuple(sorted({run.stage for run in passes}))
        blocks = tuple(
            TimelineBlock(run.kind, run.stage, run.micro_batch, run.begun, run.ended, stages.index(run.stage))  # type: ignore[arg-type]
            for run in passes
        )
        busy = sum(run.ended - run.begun for run in passes)
        rows.append(TimelineRow(rank, stages, blocks, busy, 1.0 - busy / end, (0,) * len(stages)))
    idle = sum(row.idle_share for row in rows) / len(rows)
    count = len({run.micro_batch for run in ranks[0]})
    return TimelineInfo("the step", count, end, idle, tuple(rows), measured=True)
