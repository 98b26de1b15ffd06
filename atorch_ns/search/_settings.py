"""What a search looks for, and when it ends."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SearchSettings"]


class SearchSettings(BaseModel):
    """How the fully automatic mode searches. Frozen; every field has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Literal["time", "memory", "batch", "cost"] = Field(
        default="time",
        description="What is best: the shortest step, the least memory, the largest micro-batch that fits, or "
        "the lowest cost per token.",
    )
    sampler: Literal["guided", "tpe", "gp", "exhaustive", "random"] = Field(
        default="guided",
        description="Which candidate is tried next: guided by the estimate and what was measured, by an Optuna "
        "sampler, all of them, or any.",
    )
    time_limit_s: float | None = Field(default=None, gt=0, description="Seconds for the whole search.")
    max_trials: int | None = Field(default=None, ge=1, description="Trials at most.")
    memory_limit_gib: float | None = Field(
        default=None, gt=0, description="GiB a rank may use; null for the device's memory less a reserve."
    )
    memory_reserve: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the device's memory that is left free."
    )
    seed: int = Field(default=0, description="Of the samplers: same seed, same measurements, same choice.")
    win_probability: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="The search ends when no untried candidate wins by more than the noise with this chance.",
    )
    max_micro_batches: int = Field(
        default=8,
        ge=1,
        description="Largest number of micro-batches that accumulation may use; pipelines may use 4 for each rank. "
        "Unless it is given, more are tried where nothing fits in memory otherwise.",
    )
    trial_deadline_s: float = Field(default=120.0, gt=0, description="Seconds after which a trial hangs.")
    probe: bool = Field(
        default=True,
        description="Compare the winner's numbers with those of one process before it is returned.",
    )
    profile_database: str | None = Field(
        default=None,
        description="File of measured times of blocks: with one, each distinct block is timed once on this kind "
        "of device, and read from there by later searches.",
    )
    re_profile: bool = Field(
        default=False, description="Measure blocks anew instead of reading the database."
    )
