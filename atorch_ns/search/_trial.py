"""Trial: a strategy run for a few steps on all ranks, what is asked of it, and what came of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["StopRule", "TrialOutcome", "TrialStatus", "TrialTask"]

TrialStatus = Literal[
    "ok",
    "stopped early",
    "out of memory",
    "raised",
    "hung",
    "died",
    "non-finite",
    "wrong",
    "refused",
    "cancelled",
]
"""How a trial ended. ``wrong``: a probe found numbers that differ from one process's. ``refused``: the
strategy cannot be applied. ``cancelled``: another rank failed, or the search ended before."""


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """How long a trial runs. All ranks decide alike, from times that are the maximum over ranks.

    Attributes:
        warmup_steps: not timed (compilation, allocator, first collectives).
        block_steps: steps between two decisions.
        min_steps, max_steps: timed steps.
        max_seconds: of timed steps.
        best_seconds: median step of the best trial so far; ``None`` for the first.
        best_noise: its standard error, in seconds.
        confidence: a trial stops once its interval at this confidence lies wholly above the best's.
        precision: a trial stops once the half-width of its interval is this share of its median.
    """

    warmup_steps: int = 1
    block_steps: int = 2
    min_steps: int = 4
    max_steps: int = 20
    max_seconds: float = 20.0
    best_seconds: float | None = None
    best_noise: float = 0.0
    confidence: float = 0.95
    precision: float = 0.01


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """One trial, as the coordinator hands it to every rank.

    Attributes:
        id: counts up; a report of an older id is ignored.
        key: of the candidate.
        steps: of its strategy.
        rule: how long it runs.
        deadline_s: seconds after which a rank that has not reported is taken to hang, set-up included.
        attempt: 0, or the number of earlier tries that no fault of the candidate ended.
        kind: ``"trial"``, or ``"probe"`` for a comparison of numerics with one process.
    """

    id: int
    key: str
    steps: tuple[tuple[str, Any], ...]
    rule: StopRule
    deadline_s: float = 120.0
    attempt: int = 0
    kind: Literal["trial", "probe"] = "trial"


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """What came of a trial, over all ranks. All figures are measured.

    Attributes:
        status: how it ended.
        step_seconds: each timed step, the maximum over ranks.
        peak_bytes: by rank, the most that tensors (CPU) or the allocator (GPU) held at once, beyond what the
            process held before the trial; empty where it was not measured.
        state_bytes: by rank, parameters, gradients and optimizer states after the last step.
        collectives: by kind, calls and bytes in one step, as ``{"all_reduce": (3, 4096)}``.
        loss: of the last step, the mean over ranks.
        setup_seconds: from the task's arrival to the first timed step.
        total_seconds: from the task's arrival to the report.
        reason: why it failed, in the failing rank's words.
        rank: the failing rank.
        log: path of the log file with its output and traceback, on that rank's machine.
        refused_by: the method that refused to be applied, where one did.
    """

    status: TrialStatus
    step_seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    state_bytes: tuple[int, ...] = ()
    collectives: dict[str, tuple[int, int]] | None = None
    loss: float | None = None
    setup_seconds: float = 0.0
    total_seconds: float = 0.0
    reason: str = ""
    rank: int | None = None
    log: str = ""
    refused_by: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it gave a step time."""
        return self.status in ("ok", "stopped early") and bool(self.step_seconds)

    @property
    def median_seconds(self) -> float:
        """Median step; NaN without one."""
        return statistics.median(self.step_seconds) if self.step_seconds else float("nan")

    @property
    def noise_seconds(self) -> float:
        """Standard error of the median, from the median absolute deviation: 1.2533 × 1.4826 MAD / √n."""
        if len(self.step_seconds) < 2:
            return float("inf")
        middle = self.median_seconds
        mad = statistics.median(abs(value - middle) for value in self.step_seconds)
        return float(1.2533 * 1.4826 * mad / len(self.step_seconds) ** 0.5)
