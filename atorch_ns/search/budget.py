"""Budget of a search: when it stops, and how long it and each of its trials may take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from atorch_ns.search.knowledge import Knowledge
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.outcome import SearchSetting
from atorch_ns.search.ranking import RankedCandidate, noise
from atorch_ns.search.space.candidate import Candidate
from atorch_ns.search.trial import Ledger, StopRule

SHARE_OF_TRIALS = 5  # without ``max_trials``, a search runs at most one trial per this many candidates
LEAST_TRIALS = 6  # lower bound of that limit
FAILURES = 6  # if this many trials fail for reasons other than memory and none works, the job is at fault
SAME_ERRORS = 3  # the same limit if all of them raised the same error
MARGIN = 0.01  # a candidate that would win by less is not worth a trial, however quiet the machine

PROBE_DEADLINE_S = 60.0
LEAST_DEADLINE_S = 10.0  # minimum deadline of a started trial, even if less time is left
# Share of the time left that a trial's timed steps may take: many rough trials tell more than two exact ones.
SHARE_OF_THE_TIME = 0.1
LEAST_TRIAL_S = 1.0  # lower bound of that share, in seconds
LONG_STEP_S = 5.0  # from here on, one step of warming up is enough


def default_max_trials(knowledge: Knowledge) -> int:
    """Returns the maximum number of trials of a search without ``max_trials``."""
    runnable = sum(candidate.pruned is None for candidate in knowledge.candidates)
    return max(LEAST_TRIALS, runnable // SHARE_OF_TRIALS)


def stop_reason(knowledge: Knowledge, settings: SearchSettings) -> str:
    """Returns why the search tries no further candidate, as a sentence. Empty if it tries one."""
    number = knowledge.ledger.num_run
    if settings.max_trials is not None and number >= settings.max_trials:
        return f"max_trials={settings.max_trials} was reached"
    if not knowledge.ranked:  # nothing has worked yet
        return _common_failure(knowledge)
    if settings.sampler == "exhaustive":
        return ""
    if settings.sampler != "random" and knowledge.open:  # a sampler that learns may stop before all are tried
        margin = max(MARGIN, min(0.5, noise(knowledge.ranked)))
        chance = knowledge.chance_of_better(margin, settings.seed)
        if chance < settings.win_probability:
            return (
                f"the chance that any untried candidate is better by more than {margin:.1%} is {chance:.1%}, "
                f"below {settings.win_probability:.1%}"
            )
    if settings.max_trials is None and number >= default_max_trials(knowledge):
        runnable = sum(candidate.pruned is None for candidate in knowledge.candidates)
        few = number <= runnable / SHARE_OF_TRIALS  # else LEAST_TRIALS was reached
        share = "a fifth" if few else f"{number / max(1, runnable):.0%}"
        return f"{number} trials were run, {share} of the number of candidates ({runnable})"
    return ""


def _common_failure(knowledge: Knowledge) -> str:
    ends = [(key, entry.merged) for key, entry in knowledge.ledger if entry.judged]
    reasons = {end.reason if end.status == "raised" else "" for _, end in ends}
    if len(ends) >= SAME_ERRORS and len(reasons) == 1:  # "" stands for every other end
        methods = {candidate.key: {name for name, _ in candidate.steps} for candidate in knowledge.candidates}
        shared = set.intersection(*(methods[key] for key, _ in ends))
        others = (methods[knowledge.candidates[index].key] for index in knowledge.open)
        reason = reasons.pop()
        if reason and all(shared <= other for other in others):  # all have the methods shared by failures
            return f"every trial raised the same error: {reason}"
    failures = [end for key, end in ends if key not in knowledge.short_of_memory]
    if len(failures) >= FAILURES and not any(end.succeeded for end in failures):
        return f"the first {len(failures)} trials all failed, so the strategies are not the cause"
    return ""


class TimeBudget:
    """The time limits of a search and of its trials.

    Attributes:
        is_short: whether the last deadline was cut to the end of the search's own time.

    Args:
        setting: setting of the search, with the time that profile and estimates took.
        settings: the limits.
        clock: seconds, from any origin; the search begins now.
        has_single: whether a trial in one process follows the choice of the winner.
    """

    def __init__(
        self,
        setting: SearchSetting,
        settings: SearchSettings,
        clock: Callable[[], float],
        has_single: bool = False,
    ) -> None:
        self._earlier_seconds = setting.profile_seconds + setting.estimate_seconds
        self._settings, self.is_short = settings, False
        self._clock, self._num_after = clock, settings.probe + has_single
        self._start = clock()

    @property
    def elapsed(self) -> float:
        """Seconds of the search so far, profile and estimates included."""
        return self._clock() - self._start + self._earlier_seconds

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        limit = self._settings.time_limit_s
        return math.inf if limit is None else limit - self.elapsed

    def usual_cost(self, candidates: Mapping[str, Candidate], ledger: Ledger) -> float:
        """Seconds that a trial has taken, special set-up left out; 0 before the first."""
        durations = [
            max(0.0, outcome.total_seconds - candidates[key].setup_seconds)
            for key, entry in ledger
            if not entry.resumed
            for outcome in entry.outcomes
        ]
        return statistics.median(durations) if durations else 0.0

    def affords(self, candidate: Candidate, usual_cost: float) -> bool:
        """Returns whether a trial and the steps after the winner's choice are expected to end in time."""
        # Many refusals make the usual trial cheap, but what follows runs whole.
        after = self._num_after * max(usual_cost, LEAST_TRIAL_S)
        return usual_cost + after + candidate.setup_seconds <= self.left

    def rule(self, best: RankedCandidate | None, predicted_seconds: float, *, times: bool) -> StopRule:
        """The stop rule of a trial: it runs until it is clearly worse than the best, or is known precisely.

        Args:
            predicted_seconds: predicted time of a step.
            times: whether the objective is a time, so that a slow trial may end early.
        """
        warmup = 2 if predicted_seconds < LONG_STEP_S else 1  # DDP rebuilds its buckets in the second step
        longest = min(StopRule().max_seconds, max(LEAST_TRIAL_S, self.left * SHARE_OF_THE_TIME))
        rule = StopRule(warmup_steps=warmup, max_seconds=longest)
        if best is None or not times:
            return rule
        median = best.outcome.median_seconds
        return replace(rule, best_seconds=median, best_noise=best.error * median)

    def deadline(self, candidate: Candidate, rule: StopRule, predicted_seconds: float | None) -> float:
        """Returns the seconds after which a trial counts as hung.

        It is longer than the setting if steps or set-up are known to be slow.
        It is shorter if the search ends earlier.

        Args:
            rule: when the trial stops.
            predicted_seconds: time of a step, corrected by trials; ``None`` before the first.
        """
        deadline = self._settings.trial_deadline_s + candidate.setup_seconds
        if predicted_seconds is not None:
            slow = 3 * predicted_seconds * (rule.warmup_steps + rule.min_steps)
            deadline = max(deadline, min(slow, 10 * deadline))  # predictions stretch it tenfold at most
        end = max(LEAST_DEADLINE_S, self.left + LEAST_DEADLINE_S / 2)  # the search may end a little late
        self.is_short = end < deadline  # a trial that hangs then does not count against its candidate
        return min(deadline, end)

    def single_deadline(self, usual_cost: float) -> float:
        """Deadline of the one-process trial in seconds: three usual trials, enough at the winner's speed."""
        deadline = max(LEAST_DEADLINE_S, 3 * usual_cost)
        self.is_short = self.left < deadline
        return max(LEAST_DEADLINE_S, min(deadline, self.left))

    def probe_deadline(self, candidate: Candidate) -> float:
        """Seconds after which the check of a candidate's numerics counts as hung."""
        deadline = max(PROBE_DEADLINE_S, 3 * candidate.setup_seconds)
        return min(deadline, max(2 * LEAST_DEADLINE_S, self.left))
