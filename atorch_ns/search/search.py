"""Search: hands out trials, takes their outcomes, and always knows the best candidate and the reasons."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from atorch_ns.search.budget import TimeBudget, default_max_trials, stop_reason
from atorch_ns.search.conclude import conclude
from atorch_ns.search.knowledge import Knowledge
from atorch_ns.search.objective import Objective, SearchSettings
from atorch_ns.search.outcome import SearchOutcome, SearchSetting
from atorch_ns.search.ranking import CONFIDENCE_Z, SAME_WITHIN, RankedCandidate
from atorch_ns.search.residual_model import read_features
from atorch_ns.search.sampler import make_sampler
from atorch_ns.search.space.candidate import Candidate
from atorch_ns.search.trial import Ledger, StopRule, TaskKind, TrialOutcome, TrialTask
from atorch_ns.text import count_noun, seconds_text

CONFIRM_WITHIN = 0.1  # winner and closest rival are run once more if they differ by less than this share
CONFIRM_PLAIN_WITHIN = 0.5  # the same for the plain strategy, which is measured first: machines drift so much
MOST_REPETITIONS = 4  # maximum trials of the best, to tell it from the plain strategy; four halve the noise
NEAR_WITHIN = 0.05  # candidates this near to the repeated best are repeated, too: noise decides between them
FIRST_LOOK = 3  # minimum trials of different strategies before the last ones are kept for repetitions
KNOWN_WITHIN = 0.1  # a known strategy is confirmed by a trial this near to its earlier time, or faster
OUT_OF_MEMORY = 2  # after this many out-of-memory trials and no result, the smallest is tried


@dataclass(frozen=True)
class Known:
    """A strategy that an earlier search of the same setting found.

    Attributes:
        key: the candidate's key.
        seconds: its median step in that search.
    """

    key: str
    seconds: float


class Recorder(Protocol):
    """Keeps trials for later searches; must not raise."""

    def record(
        self, setting: SearchSetting, candidate: Candidate, task: TrialTask, outcome: TrialOutcome
    ) -> None:
        """Keeps one trial."""


class Search:
    """A search over a list of candidates. Pure but for the clock; one trial at a time.

    The plain strategy is tried first, if it is predicted to fit; then the sampler's choices. The winner and a
    close rival are run once more. The winner's numbers and time are compared with those of one process.

    Args:
        candidates: the candidates of :func:`~atorch_ns.search.explore`.
        clock: seconds, from any origin.
        known: a strategy to try first; if its trial confirms it, the search ends.
        recorder: keeps every trial that shows something about its candidate.

    Raises:
        MissingPackageError: if the sampler needs a package that is not there.
    """

    def __init__(
        self,
        setting: SearchSetting,
        settings: SearchSettings,
        candidates: Iterable[Candidate],
        *,
        clock: Callable[[], float] = time.monotonic,
        known: Known | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.setting = setting
        self.settings = settings
        self.candidates = tuple(candidates)
        has_single = any(candidate.fits_alone for candidate in self.candidates)
        self._budget = TimeBudget(setting, settings, clock, has_single)
        self._hint = known
        self._recorder = recorder
        self._sampler = make_sampler(settings)
        self._objective = Objective(settings, setting.memory_limit_bytes)
        self._features = read_features(self.candidates)
        self._by_key = {candidate.key: candidate for candidate in self.candidates}
        self._ledger = Ledger()
        self._task: TrialTask | None = None  # handed out, its outcome not told yet
        self._last_id = 0
        self._stop_reason = ""  # why nothing new is tried; repetitions and checks may still follow
        self._cancel_reason = ""  # why it was ended from outside
        self._out_of_time = False
        self._over = False
        self._confirming: list[str] = []  # keys that are still to be repeated
        self._seconds: float | None = None  # duration of the search, once it is over
        self._knowledge = self._build_knowledge()

    # ---- calls of the engine

    def ask(self) -> TrialTask | None:
        """Returns the next trial, the same until its outcome has come. ``None`` when the search is over."""
        if self._task is None and not self._over:
            self._task = self._next_task()
            if self._task is None:
                self._over = True
                self._seconds = self._budget.elapsed
        return self._task

    def tell(self, task_id: int, outcome: TrialOutcome) -> None:
        """Takes the outcome of the trial from :meth:`ask` and ignores that of any other."""
        task = self._task
        if task is None or task.id != task_id:
            return
        self._task = None
        # A deadline that the end of the search cut short proves nothing against the candidate.
        if outcome.status == "hung" and self._budget.is_short and self._budget.left <= 0:
            outcome = replace(outcome, status="cancelled", reason=self._too_little_time(task))
        if task.kind == "probe":
            self._ledger.probes[task.key] = outcome
        elif task.kind == "single":
            self._ledger.singles[task.key] = outcome
        else:
            self._ledger.add(task.key, outcome)
            if self._recorder is not None and outcome.status != "cancelled":  # which shows nothing
                self._recorder.record(self.setting, self._by_key[task.key], task, outcome)
        self._knowledge = self._build_knowledge()

    def resume(self, key: str, outcome: TrialOutcome) -> bool:
        """Adds a trial of an earlier search; returns whether this search has such a candidate."""
        if key not in self._by_key:
            return False
        self._ledger.add(key, outcome, resumed=True)
        self._knowledge = self._build_knowledge()
        return True

    def cancel(self, reason: str) -> None:
        """Ends the search at once and keeps the results so far.

        Before any measurement, the outcome chooses by prediction, unless trials have failed.
        """
        if not self._over:
            self._cancel_reason = reason
            self._over = True
            self._task = None
            self._seconds = self._budget.elapsed

    @property
    def best(self) -> str | None:
        """Key of the candidate that would be chosen now; ``None`` before any trial that ran and fits."""
        winner = self._knowledge.winner
        return winner.candidate.key if winner is not None else None

    def outcome(self) -> SearchOutcome:
        """Everything found so far."""
        return conclude(
            self.setting,
            self.settings,
            self._knowledge,
            stop_reason=self._cancel_reason or self._stop_reason,
            seconds=self._budget.elapsed if self._seconds is None else self._seconds,
            cut_short=bool(self._cancel_reason) or self._out_of_time,
            over=self._over,
        )

    # ---- choice of the next trial

    def _next_task(self) -> TrialTask | None:
        # New candidates, repetitions, the check of numerics, and last the time of one process.
        key = None if self._stop_reason else self._next_to_explore()
        key = key or self._next_to_confirm()
        if key is not None:
            return self._trial_task(key)
        winner = self._knowledge.winner
        if winner is None:
            if not self._ledger.rejected or not self._knowledge.open:
                return None
            self._stop_reason = ""  # the check of numerics has ruled out all measured candidates
            key = self._next_to_explore()
            return None if key is None else self._trial_task(key)
        if self.settings.probe and winner.candidate.key not in self._ledger.probes:
            deadline_s = self._budget.probe_deadline(winner.candidate)
            return self._task_of(winner.candidate, StopRule(), deadline_s, "probe")
        return self._single_process_task(winner)

    def _next_to_explore(self) -> str | None:
        again = next((key for key, entry in self._ledger if not entry.judged), None)  # lost once: repeated
        if self._budget.left <= 0:
            self._stop_reason = self._time_was_short()
            return None  # nothing new is tried from here on
        if again is not None and again not in self._knowledge.learned:
            if self.settings.max_trials is None or self._ledger.num_run < self.settings.max_trials:
                return again
            self._stop_reason = f"max_trials={self.settings.max_trials} was reached"
            return None
        self._stop_reason = (
            self._confirmed_known() or stop_reason(self._knowledge, self.settings) or self._kept_to_confirm()
        )
        if self._stop_reason:
            return None
        usual = self._budget.usual_cost(self._by_key, self._ledger)
        open_ = self._knowledge.open
        affordable = [index for index in open_ if self._budget.affords(self.candidates[index], usual)]
        if not self._ledger.num_run:  # one trial is better than none, whatever it costs
            affordable = open_
        if affordable:
            return self.candidates[self._pick_candidate(affordable, usual)].key
        self._stop_reason = self._time_was_short() if open_ else self._all_tried()
        return None

    def _too_little_time(self, task: TrialTask) -> str:
        return (
            f"it was not done when the time limit of {self.settings.time_limit_s:g} s ended, {task.deadline_s:.3g} s "
            "after it began; raise the limit on a slow or busy machine"
        )

    def _time_was_short(self) -> str:
        self._out_of_time = True
        trials = count_noun(self._ledger.num_run, "trial")
        return f"the time limit of {self.settings.time_limit_s:g} s allowed {trials}"

    def _all_tried(self) -> str:
        is_pruned = any(each.pruned is not None and each.pruned.kind == "memory" for each in self.candidates)
        short = is_pruned or self._knowledge.too_large
        if len(self._ledger):
            return f"every candidate{' that may fit in memory' if short else ''} was tried"
        return "no candidate fits in memory" if short else "no candidate could be tried"

    def _pick_candidate(self, open_: list[int], usual_cost: float) -> int:
        # The known strategy, the plain one, then the sampler's choice; if memory is short, the smallest.
        if self._hint is not None and not len(self._ledger):
            for index in open_:
                if self.candidates[index].key == self._hint.key:
                    return index
        for index in open_:
            if self.candidates[index].is_baseline:
                return index
        if not self._knowledge.ranked and self._knowledge.num_out_of_memory >= OUT_OF_MEMORY:
            # Prefers candidates without the methods that ran out of memory while they were applied.
            chances = self._knowledge.chances_to_run
            return min(
                open_, key=lambda index: (-chances[index], self.candidates[index].predicted_bytes or math.inf)
            )
        return self._sampler(self._knowledge, open_, usual_cost)

    def _confirmed_known(self) -> str:
        if self._hint is None or len(self._ledger) != 1 or not self._knowledge.ranked:
            return ""
        best = self._knowledge.ranked[0]
        slower = best.outcome.median_seconds / self._hint.seconds - 1
        # A trial that is slower than noise explains confirms nothing, and the search goes on.
        if best.candidate.key != self._hint.key or slower > max(KNOWN_WITHIN, CONFIDENCE_Z * best.error):
            return ""
        now, then = seconds_text(best.outcome.median_seconds), seconds_text(self._hint.seconds)
        return f"an earlier search found this strategy, and one trial confirms it ({now} now, {then} then)"

    @property
    def _trials_left(self) -> int:
        limit = self.settings.max_trials or default_max_trials(self._knowledge)
        return limit - self._ledger.num_run

    def _kept_to_confirm(self) -> str:
        # The best of many is partly luck, so the last trials repeat it. Candidates left out are those that
        # predictions have put last.
        is_unordered = any(self.candidates[index].estimate is None for index in self._knowledge.open)
        guessing = is_unordered or self.settings.sampler == "random"
        rivals = [] if guessing else self._close_rivals()
        if not rivals or self._ledger.num_run < FIRST_LOOK or self._trials_left != len(rivals):
            return ""
        run = count_noun(self._ledger.num_run, "trial")
        names = " and ".join(self._by_key[key].label for key in rivals)
        return f"{run} were run, and the remaining ones repeat {names}"

    def _next_to_confirm(self) -> str | None:
        # In turn, since machines drift between trials.
        self._confirming = self._confirming or self._close_rivals() or self._plain_rival()
        while self._confirming:
            key = self._confirming.pop(0)
            usual = self._budget.usual_cost(self._by_key, self._ledger)
            if self._trials_left > 0 and self._budget.affords(self._by_key[key], usual):
                return key
        return None

    def _close_rivals(self) -> list[str]:
        # Candidates worth a repetition: the plain strategy or the next best, and the best; or none.
        ranking, winner = self._knowledge.ranked, self._knowledge.winner
        if self.settings.sampler == "exhaustive" or not self._objective.counts_time or len(ranking) < 2:
            return []
        best, *others = ranking
        if best.num_trials > 1:
            assert winner is not None
            unclear = winner.value > best.value * (1 + SAME_WITHIN) and best.num_trials < MOST_REPETITIONS
            if unclear:  # noise alone keeps a clearly slower one as its equal
                return [winner.candidate.key, best.candidate.key]
            within = best.value * (1 + NEAR_WITHIN)
            rivals = [entry for entry in others if entry.num_trials == 1 and entry.value <= within]
            return [entry.candidate.key for entry in rivals[:1]]
        near = []
        for entry in others:
            within = CONFIRM_PLAIN_WITHIN if entry.candidate.is_baseline else CONFIRM_WITHIN
            if entry.value <= best.value * (1 + within):
                near.append(entry)
        if not near:
            return []
        rival = next((entry for entry in near if entry.candidate.is_baseline), near[0])  # else the next best
        return [rival.candidate.key, best.candidate.key]

    def _plain_candidates(self) -> list[Candidate]:
        # In the winner's precision, in the order of predictions; none where time does not count.
        winner = self._knowledge.winner
        if winner is None or not self._objective.counts_time:
            return []
        precision = winner.candidate.precision
        return [each for each in self.candidates if each.is_plain and each.precision == precision]

    def _plain_rival(self) -> list[str]:
        # Without a plain strategy in the winner's precision, the winner's gain would be a prediction.
        plain = self._plain_candidates()
        open_ = [each.key for each in plain if self.candidates.index(each) in self._knowledge.open]
        return [] if any(self._ledger.judged(candidate.key) for candidate in plain) else open_[:1]

    # ---- tasks

    def _single_process_task(self, winner: RankedCandidate) -> TrialTask | None:
        # Several processes may be no faster than one, which runs a plain strategy as far as it applies there.
        candidate = winner.candidate
        plain = [each for each in self._plain_candidates() if each.fits_alone]
        if candidate.key in self._ledger.singles or not plain:
            return None
        deadline_s = self._budget.single_deadline(self._budget.usual_cost(self._by_key, self._ledger))
        rule = self._budget.rule(winner, winner.value, times=True)
        return replace(self._task_of(candidate, rule, deadline_s, "single"), steps=plain[0].steps)

    def _trial_task(self, key: str) -> TrialTask:
        candidate = self._by_key[key]
        ranking = self._knowledge.ranked
        predicted_seconds = math.exp(self._knowledge.seconds.mean[self.candidates.index(candidate)])
        best = ranking[0] if ranking else None
        rule = self._budget.rule(best, predicted_seconds, times=self._objective.counts_time)
        # Before any trial, the scale of predictions may be wrong, so that deadlines do not depend on them.
        corrected_seconds = predicted_seconds if ranking and candidate.estimate is not None else None
        deadline = self._budget.deadline(candidate, rule, corrected_seconds)
        return self._task_of(candidate, rule, deadline, "trial")

    def _task_of(self, candidate: Candidate, rule: StopRule, deadline_s: float, kind: TaskKind) -> TrialTask:
        self._last_id += 1
        return TrialTask(
            id=self._last_id,
            key=candidate.key,
            steps=candidate.steps,
            rule=rule,
            deadline_s=deadline_s,
            attempt=self._ledger.attempts(candidate.key) if kind == "trial" else 0,
            kind=kind,
        )

    def _build_knowledge(self) -> Knowledge:
        limit = self.setting.memory_limit_bytes
        return Knowledge(self.candidates, self._features, self._ledger, self._objective, limit_bytes=limit)
