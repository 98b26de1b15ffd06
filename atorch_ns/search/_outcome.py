"""What a search found: every candidate with its figures and its fate. The data that reports draw."""

from __future__ import annotations

from dataclasses import dataclass

from atorch_ns.search._candidate import Candidate, Fate
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._trial import TrialOutcome

__all__ = ["Row", "SearchOutcome", "Setting"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate.

    Attributes:
        candidate: with what was predicted.
        fate: what became of it.
        reason: why it won, lost, failed, was pruned or not tried, in one sentence with its numbers.
        trial: what was measured; ``None`` if it was not tried.
        trial_number: 1 for the first trial; 0 if it was not tried.
        corrected_seconds: the prediction after what the trials taught; ``None`` before the first trial.
        corrected_bytes: the same for the peak.
    """

    candidate: Candidate
    fate: Fate
    reason: str
    trial: TrialOutcome | None = None
    trial_number: int = 0
    corrected_seconds: float | None = None
    corrected_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was searched for, in words and figures for the report's head.

    Attributes:
        model: its class.
        num_parameters: elements.
        world_size, num_nodes: processes and nodes.
        device: its name.
        memory_limit_bytes: what one rank may use.
        global_batch, num_tokens: samples in a step, tokens in a sample.
        fingerprint: digest of model, cluster, workload and methods; the same for the same job.
        profile_seconds, estimate_seconds: what finding out and pricing took.
        notes: what was assumed, as sentences.
    """

    model: str
    num_parameters: int
    world_size: int
    num_nodes: int
    device: str
    memory_limit_bytes: int
    global_batch: int
    num_tokens: int
    fingerprint: str
    profile_seconds: float = 0.0
    estimate_seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """Everything about a search. Plain values only (JSON by pydantic's ``TypeAdapter``).

    Attributes:
        setting: what was searched for.
        settings: how.
        rows: every candidate, the winner first, then by measured and predicted time.
        best: key of the winner; ``None`` if none could be run. A search that ended before anything was
            measured chooses by prediction; the winner's ``trial`` is then ``None``.
        stop_reason: why the search ended, as a sentence.
        num_trials: trials that were run; each attempt of a candidate and each repetition counts.
        seconds: of the whole search.
        noise: relative standard error of a step's median, the middle one of all trials that ran: each trial's
            ``noise_seconds`` over its ``median_seconds``, as in every ``±`` beside a measured step.
        lower_bound_seconds: no candidate is expected below this; corrected predictions less their error.
        gap: how far the winner may be from it, as a share of the winner's step.
        pareto: keys of the candidates that no other beats in both time and memory.
        nearest_miss: if nothing fits or runs, what came nearest and what to do, as a sentence.
        resumed: trials read from an earlier history instead of run.
        checks: self-checks, each ``"<what>: passed"`` or ``"<what>: failed: <numbers>"``.
    """

    setting: Setting
    settings: SearchSettings
    rows: tuple[Row, ...]
    best: str | None
    stop_reason: str
    num_trials: int
    seconds: float
    noise: float = 0.0
    lower_bound_seconds: float | None = None
    gap: float | None = None
    pareto: tuple[str, ...] = ()
    nearest_miss: str = ""
    resumed: int = 0
    checks: tuple[str, ...] = ()

    @property
    def unchecked(self) -> str:
        """The self-checks that could not be made, with the reason; empty if all were."""
        return "; ".join(check for check in self.checks if ": could not be run" in check)

    @property
    def winner(self) -> Row | None:
        """The chosen candidate's row."""
        return next((row for row in self.rows if row.candidate.key == self.best), None)

    @property
    def baseline(self) -> Row | None:
        """The plain strategy's row."""
        return next((row for row in self.rows if row.candidate.is_baseline), None)
