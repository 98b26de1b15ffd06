"""Search settings, and the objective: one positive number for each candidate, the smaller the better."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atorch_ns.search.space.candidate import Candidate
from atorch_ns.search.trial import TrialOutcome


class SearchSettings(BaseModel):
    """Settings of the fully automatic mode's search. Frozen; every field has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Literal["time", "memory", "batch", "cost"] = Field(
        default="time",
        description="What is best: the shortest step, the least memory, the largest micro-batch that fits, "
        "or the lowest cost per token.",
    )
    sampler: Literal["guided", "tpe", "gp", "exhaustive", "random"] = Field(
        default="guided",
        description="Which candidate is tried next: guided by the estimate and what was measured, by an "
        "Optuna sampler, all of them, or any.",
    )
    time_limit_s: float | None = Field(default=None, gt=0, description="Seconds for the whole search.")
    max_trials: int | None = Field(default=None, ge=1, description="Trials at most.")
    memory_limit_gib: float | None = Field(
        default=None,
        ge=2**-30,
        allow_inf_nan=False,
        description="GiB that a rank's process may take beyond what it holds before, on a GPU all that it "
        "takes of the device, at most the device's memory; null for the device's memory less a reserve. Trials "
        "run under the limit that is given.",
    )
    memory_reserve: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Share of the device's memory that is left free; null for 0.1 on CPUs and nothing on "
        "GPUs, where what the allocator, CUDA and NCCL need is predicted.",
    )
    seed: int = Field(default=0, description="Of the samplers: same seed, same measurements, same choice.")
    win_probability: float = Field(
        default=0.02,
        gt=0,
        lt=1,
        description="The search ends when no untried candidate wins by more than the noise with this chance.",
    )
    max_micro_batches: int = Field(
        default=128,
        ge=1,
        description="Largest number of micro-batches that a step may have; pipelines may use 4 for each rank "
        "in any case. Unless it is given, more are tried where nothing fits in memory otherwise.",
    )
    trial_deadline_s: float = Field(default=120.0, gt=0, description="Seconds after which a trial hangs.")
    probe: bool = Field(
        default=True,
        description="Compare the winner's numbers with those of one process before it is returned.",
    )
    profile_database: str | None = Field(
        default=None,
        description="File of measured times of blocks: with one, each distinct block is timed once on this "
        "kind of device, and read from there by later searches.",
    )
    re_profile: bool = Field(
        default=False, description="Measure blocks anew instead of reading the database."
    )


class Objective:
    """The number that a search minimises: seconds of a step for ``time`` and ``cost`` (proportional on one
    cluster), bytes for ``memory``, the inverse of the largest batch for ``batch``.

    Args:
        settings: the settings of the search.
        limit_bytes: bytes that one rank may use; 0 for any amount.
    """

    def __init__(self, settings: SearchSettings, limit_bytes: int = 0) -> None:
        self.kind = settings.objective
        self._limit = limit_bytes

    @property
    def counts_time(self) -> bool:
        """True if the objective is a time."""
        return self.kind in ("time", "cost")

    def predicted(self, candidate: Candidate) -> float | None:
        """Returns the predicted objective; ``None`` without an estimate."""
        if candidate.estimate is None:
            return None
        value = candidate.estimate.step_seconds
        if self.kind == "memory":
            value = candidate.estimate.peak_bytes
        elif self.kind == "batch":
            value = 1 / candidate.largest_batch if candidate.largest_batch else math.inf
        return value if value > 0 and math.isfinite(value) else None

    def measured(self, candidate: Candidate, outcome: TrialOutcome) -> float:
        """Returns the objective that a trial with a step time measured.

        Memory that was not measured counts as predicted. The largest batch is the predicted one. It is
        reduced if it does not fit with the bytes by which the trial exceeded its own prediction.
        """
        if self.counts_time:
            return outcome.median_seconds
        predicted_bytes = candidate.estimate.allocated_bytes if candidate.estimate is not None else 0.0
        peak = float(outcome.max_peak_bytes) or predicted_bytes
        if self.kind == "memory":
            return peak or math.inf
        more = peak - predicted_bytes
        if outcome.process_bytes and candidate.estimate is not None:
            more = outcome.max_needed_bytes - candidate.estimate.peak_bytes
        batch = self._corrected_batch(candidate, more)
        return 1 / batch if batch else math.inf

    def _corrected_batch(self, candidate: Candidate, more_bytes: float) -> int:
        # Samples of the largest step, if steps take ``more_bytes`` more than predicted; 0 if unknown.
        largest, batch = candidate.largest_batch or 0, candidate.given_batch or 0
        peak, estimate = candidate.largest_batch_bytes, candidate.estimate
        if not (self._limit and peak and batch and estimate is not None) or largest <= batch:
            return largest
        excess = peak + more_bytes - self._limit  # of the largest batch
        slope = (peak - estimate.peak_bytes) / (largest - batch)  # bytes a sample, taken to be constant
        if excess <= 0 or slope <= 0:
            return largest
        return max(batch, int((largest - excess / slope) // batch) * batch)  # multiples of the given batch

    def noise(self, outcome: TrialOutcome) -> float:
        """Returns the relative standard error of a measurement, from the steps of one trial."""
        if not self.counts_time:
            return 0.0
        noise = outcome.noise_seconds / outcome.median_seconds if outcome.median_seconds > 0 else 0.0
        return noise if math.isfinite(noise) else 0.1  # one step shows none
