"""Pace: how long a search and each of its trials may take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

from atorch_ns.search._candidate import Candidate
from atorch_ns.search._ledger import Ledger
from atorch_ns.search._outcome import Setting
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._standing import Standing
from atorch_ns.search._trial import StopRule

__all__ = ["Pace"]

PROBE_DEADLINE_S = 60.0

LEAST_DEADLINE_S = 10.0
"""A trial that was begun may take this long, however little of the search's time is left."""

SHARE_OF_THE_TIME = 0.1
"""A trial's timed steps may take this share of the time that is left: many rough trials tell more than two
exact ones."""

LEAST_TRIAL_S = 1.0
"""… and this many seconds at least."""

LONG_STEP_S = 5.0
"""From here on, one step of warming up is enough."""


class Pace:
    """Time of a search.

    Attributes:
        hurries: whether the last deadline was shorter than usual, since the search ends before.

    Args:
        setting: what was spent before the first trial counts.
        settings: the limits.
        clock: seconds, from any origin; the search begins now.
    """

    def __init__(self, setting: Setting, settings: SearchSettings, clock: Callable[[], float]) -> None:
        self._spent = setting.profile_seconds + setting.estimate_seconds
        self._settings = settings
        self._clock = clock
        self._begun = clock()
        self.hurries = False

    @property
    def elapsed(self) -> float:
        """Seconds of the search so far, profile and estimates included."""
        return self._clock() - self._begun + self._spent

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        limit = self._settings.time_limit_s
        return math.inf if limit is None else limit - self.elapsed

    def usual_cost(self, candidates: Mapping[str, Candidate], ledger: Ledger) -> float:
        """Seconds that a trial has taken, special set-up left out; 0 before the first."""
        spent = [
            max(0.0, outcome.total_seconds - candidates[key].setup_seconds)
            for key, entry in ledger
            if not entry.resumed
            for outcome in entry.outcomes
        ]
        return statistics.median(spent) if spent else 0.0

    def affords(self, candidate: Candidate, usual_cost: float) -> bool:
        """Whether a trial, and the probe of the winner after it, is expected to end in time."""
        after = usual_cost if self._settings.probe else 0.0
        return usual_cost + candidate.setup_seconds + after <= self.left

    def rule(self, best: Standing | None, predicted_seconds: float, *, times: bool) -> StopRule:
        """How long a trial runs: until it is clear that it is worse than the best, or is known precisely.

        Args:
            best: the best so far.
            predicted_seconds: of a step.
            times: whether the objective is a time, so that a slow trial may end early.
        """
        warmup = 2 if predicted_seconds < LONG_STEP_S else 1  # DDP rebuilds its buckets in the second step
        longest = min(StopRule().max_seconds, max(LEAST_TRIAL_S, self.left * SHARE_OF_THE_TIME))
        if best is None or not times:
            return StopRule(warmup_steps=warmup, max_seconds=longest)
        median = best.outcome.median_seconds
        return StopRule(
            warmup_steps=warmup,
            max_seconds=longest,
            best_seconds=median,
            best_noise=best.error * median,
        )

    def deadline(self, candidate: Candidate, rule: StopRule, predicted_seconds: float | None) -> float:
        """Seconds after which a trial is taken to hang.

        Longer than the setting where steps are known to be slow, or set-up is; shorter where the search ends
        before.

        Args:
            candidate: that is tried.
            rule: of the trial.
            predicted_seconds: of a step, corrected by trials; ``None`` before the first.
        """
        deadline = self._settings.trial_deadline_s + candidate.setup_seconds
        if predicted_seconds is not None:
            slow = 3 * predicted_seconds * (rule.warmup_steps + rule.min_steps)
            deadline = max(deadline, min(slow, 10 * deadline))
        end = max(LEAST_DEADLINE_S, self.left + LEAST_DEADLINE_S / 2)
        self.hurries = end < deadline
        return min(deadline, end)

    def probe_deadline(self, candidate: Candidate) -> float:
        """The same for a probe."""
        deadline = max(PROBE_DEADLINE_S, 3 * candidate.setup_seconds)
        return min(deadline, max(2 * LEAST_DEADLINE_S, self.left))
