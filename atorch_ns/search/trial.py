"""Trials: tasks, outcomes, and the ledger of all outcomes of a search by candidate."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

TrialStatus = Literal[
    "ok", "stopped early", "out of memory", "raised", "hung", "died", "non-finite", "wrong", "refused",
    "cancelled",
]  # fmt: skip
"""Ends of a trial. ``wrong``: numerics differ from those of one process. ``refused``: the strategy cannot be
applied. ``cancelled``: another rank failed, or the search ended before."""


TaskKind = Literal["trial", "probe", "single"]


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Trial stop rule. All ranks decide alike, from times that are the maximum over ranks.

    Attributes:
        warmup_steps: steps that are not timed (compilation, allocator, first collectives).
        block_steps: steps between two decisions.
        min_steps, max_steps: limits of the number of timed steps.
        max_seconds: limit of the time of all timed steps.
        best_seconds: median step of the best trial so far; ``None`` for the first.
        best_noise: standard error of that median, in seconds.
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
        key, steps: of the candidate.
        deadline_s: seconds after which a rank that has not reported is taken to hang, set-up included.
        attempt: number of earlier attempts that ended through no fault of the candidate.
        kind: ``"probe"`` compares numerics with one process; ``"single"`` times the whole batch on rank 0.
    """

    id: int
    key: str
    steps: tuple[tuple[str, Any], ...]
    rule: StopRule
    deadline_s: float = 120.0
    attempt: int = 0
    kind: TaskKind = "trial"


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The measured outcome of a trial over all ranks.

    Attributes:
        step_seconds: each timed step, the maximum over ranks.
        peak_bytes: peak bytes of tensors (CPU) or the allocator (GPU) per rank, beyond those that the
            process held before the trial; empty if it was not measured.
        process_bytes: most growth per rank of the process (CPU) or its part of the device (GPU); or empty.
        further_bytes: bytes per rank that a run of 1,000 steps is expected to add to that.
        state_bytes: parameters, gradients and optimizer states per rank after the last step.
        collectives: calls and bytes in one step by kind, as ``{"all_reduce": (3, 4096)}``.
        loss: mean over ranks of the last step's loss.
        setup_seconds: time from the task's arrival to the first timed step.
        total_seconds: time from the task's arrival to the report.
        reason: reason of a failure, as the failing rank reports it.
        rank: the failing rank.
        log: path of the log file with its output and traceback, on that rank's machine.
        refused_by: the method that refused to be applied, where one did.
        while_applying: whether it failed before the first step, so that its memory says nothing of its steps.
        enforced: whether the system enforced the limit of memory on every rank.
    """

    status: TrialStatus
    step_seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    process_bytes: tuple[int, ...] = ()
    further_bytes: tuple[int, ...] = ()
    state_bytes: tuple[int, ...] = ()
    collectives: dict[str, tuple[int, int]] | None = None
    loss: float | None = None
    setup_seconds: float = 0.0
    total_seconds: float = 0.0
    reason: str = ""
    rank: int | None = None
    log: str = ""
    refused_by: str | None = None
    while_applying: bool = False
    enforced: bool = False

    @property
    def succeeded(self) -> bool:
        """True if it gave a step time."""
        return self.status in ("ok", "stopped early") and bool(self.step_seconds)

    @property
    def median_seconds(self) -> float:
        """Median step; NaN without one."""
        return statistics.median(self.step_seconds) if self.step_seconds else float("nan")

    @property
    def max_peak_bytes(self) -> int:
        """The largest peak of all ranks; 0 where it was not measured."""
        return max(self.peak_bytes, default=0)

    @property
    def needed_bytes(self) -> tuple[int, ...]:
        """Bytes per rank that a limit must allow, for the process in a long run or else for tensors."""
        if not self.process_bytes:
            return self.peak_bytes
        further = self.further_bytes or (0,) * len(self.process_bytes)
        whole = tuple(most + more for most, more in zip(self.process_bytes, further, strict=True))
        # A process that had kept memory free grows by less than its tensors take.
        tensors = self.peak_bytes if len(self.peak_bytes) == len(whole) else (0,) * len(whole)
        return tuple(map(max, whole, tensors))

    @property
    def max_needed_bytes(self) -> int:
        """The largest of all ranks; 0 where it was not measured."""
        return max(self.needed_bytes, default=0)

    @property
    def beside_bytes(self) -> int | None:
        """Largest memory that a rank needed beside tensors, in bytes; ``None`` if it was not measured."""
        if not self.process_bytes or len(self.process_bytes) != len(self.peak_bytes):
            return None
        return max(most - tensors for most, tensors in zip(self.needed_bytes, self.peak_bytes, strict=True))

    @property
    def noise_seconds(self) -> float:
        """Standard error of the median, from the median absolute deviation: 1.2533 × 1.4826 MAD / √n."""
        if len(self.step_seconds) < 2:
            return float("inf")
        middle = self.median_seconds
        mad = statistics.median(abs(value - middle) for value in self.step_seconds)
        return float(1.2533 * 1.4826 * mad / len(self.step_seconds) ** 0.5)  # √(π/2), and σ over MAD


@dataclass(frozen=True)
class BesideTensors:
    """Measured memory that processes needed beside tensors, in trials that ran.

    Attributes:
        low, middle, high: the least, the median and the most bytes of a rank.
        num_trials: trials that showed it.
    """

    low: int
    middle: int
    high: int
    num_trials: int


NOT_ITS_FAULT = ("died", "cancelled")  # ends that are held against a candidate only when they come twice


def _max_per_rank(trials: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    # Of trials that measured as many ranks as the last.
    alike = [trial for trial in trials if len(trial) == len(trials[-1])]
    return tuple(max(ranks) for ranks in zip(*alike, strict=True))


@dataclass
class CandidateTrials:
    """The trials of one candidate.

    Attributes:
        number: the number of its first trial in the search.
        outcomes: outcomes in their order, without those that were no fault of the candidate.
        lost: outcomes that were no fault of the candidate.
        resumed: trials among the outcomes that an earlier search ran.
    """

    number: int
    outcomes: list[TrialOutcome] = field(default_factory=list)
    lost: list[TrialOutcome] = field(default_factory=list)
    resumed: int = 0

    @property
    def merged(self) -> TrialOutcome:
        """All its trials as one: steps of all, the largest peaks; a failure counts above a success."""
        if not self.outcomes:
            return self.lost[-1]
        failures = [outcome for outcome in self.outcomes if not outcome.succeeded]  # the last one counts
        if failures or len(self.outcomes) == 1:
            return (failures or self.outcomes)[-1]
        last = self.outcomes[-1]
        return replace(
            last,
            status="ok" if any(outcome.status == "ok" for outcome in self.outcomes) else last.status,
            step_seconds=tuple(step for outcome in self.outcomes for step in outcome.step_seconds),
            peak_bytes=_max_per_rank([outcome.peak_bytes for outcome in self.outcomes]),
            process_bytes=_max_per_rank([outcome.process_bytes for outcome in self.outcomes]),
            further_bytes=_max_per_rank([outcome.further_bytes for outcome in self.outcomes]),
            setup_seconds=max(outcome.setup_seconds for outcome in self.outcomes),
            total_seconds=sum(outcome.total_seconds for outcome in self.outcomes),
        )

    @property
    def judged(self) -> bool:
        """True if it needs no further attempt."""
        return bool(self.outcomes) or len(self.lost) > 1  # lost twice, it is taken for its fault


class Ledger:
    """The trials of a search by candidate.

    Attributes:
        num_run, num_resumed: trials that this search ran, and that it read from a history.
        probes: outcomes of the checks of numerics, by the key of the candidate.
        singles: outcomes of the trials in one process, by the key of the candidate compared with them.
    """

    def __init__(self) -> None:
        self._entries: dict[str, CandidateTrials] = {}
        self.num_run = 0
        self.num_resumed = 0
        self.probes: dict[str, TrialOutcome] = {}
        self.singles: dict[str, TrialOutcome] = {}

    def add(self, key: str, outcome: TrialOutcome, *, resumed: bool = False) -> None:
        """Adds the outcome of a trial."""
        self.num_resumed += resumed
        self.num_run += not resumed
        entry = self._entries.setdefault(key, CandidateTrials(self.num_run + self.num_resumed))
        entry.resumed += resumed
        (entry.lost if outcome.status in NOT_ITS_FAULT else entry.outcomes).append(outcome)

    def get(self, key: str) -> CandidateTrials | None:
        """The trials of a candidate; ``None`` before its first."""
        return self._entries.get(key)

    def judged(self, key: str) -> bool:
        """Returns whether a candidate needs no trial, or no further one."""
        entry = self._entries.get(key)
        return entry is not None and entry.judged

    def attempts(self, key: str) -> int:
        """Trials of a candidate that ended through no fault of its own."""
        entry = self._entries.get(key)
        return len(entry.lost) if entry is not None else 0

    @property
    def rejected(self) -> dict[str, str]:
        """Candidates with wrong numerics, each with the finding."""
        return {
            key: f"wrong: {outcome.reason or 'its numbers differ from those of one process'}"
            for key, outcome in self.probes.items()
            if outcome.status == "wrong"
        }

    def __iter__(self) -> Iterator[tuple[str, CandidateTrials]]:
        return iter(self._entries.items())

    def __len__(self) -> int:
        return len(self._entries)
