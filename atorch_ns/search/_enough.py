"""When a search has tried enough."""

from __future__ import annotations

from atorch_ns.search._knowledge import Knowledge
from atorch_ns.search._ledger import Ledger
from atorch_ns.search._samplers import Sampler
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._standing import noise

__all__ = ["enough", "own_limit"]

SHARE_OF_TRIALS = 5
"""Without ``max_trials``, a search runs one trial for this many candidates at most."""

LEAST_TRIALS = 6
"""… and may always run this many."""

FAILURES = 6
"""Trials that fail for other reasons than memory, while none has worked, after which it is the job's fault."""

SAME_ERRORS = 3
"""The same where all of them raised one and the same error."""

MARGIN = 0.01
"""A candidate that would win by less than this is not worth a trial, however quiet the machine."""


def own_limit(knowledge: Knowledge) -> int:
    """The most trials of a search that was given no number."""
    runnable = sum(one.pruned is None for one in knowledge.candidates)
    return max(LEAST_TRIALS, runnable // SHARE_OF_TRIALS)


def enough(knowledge: Knowledge, ledger: Ledger, settings: SearchSettings, sampler: Sampler) -> str:
    """Why no further candidate is tried, as a sentence; empty if one is."""
    number = ledger.num_run
    if settings.max_trials is not None and number >= settings.max_trials:
        return f"max_trials={settings.max_trials} was reached"
    if not knowledge.ranked:
        same = _same_error(knowledge, ledger)
        if same:
            return f"every trial raised the same error: {same}"
        failed = [entry for key, entry in ledger if entry.judged and key not in knowledge.short_of_memory]
        if len(failed) >= FAILURES and not any(entry.merged.succeeded for entry in failed):
            return f"the first {len(failed)} trials all failed, so it is not for the strategies"
        return ""
    if settings.sampler == "exhaustive":
        return ""
    if sampler.learns and knowledge.open:
        margin = max(MARGIN, min(0.5, noise(knowledge.ranked)))
        chance = knowledge.chance_of_better(margin, settings.seed)
        if chance < settings.win_probability:
            return (
                f"the chance that any untried candidate is better by more than {margin:.1%} is {chance:.1%}, "
                f"below {settings.win_probability:.1%}"
            )
    if settings.max_trials is None and number >= own_limit(knowledge):
        runnable = sum(one.pruned is None for one in knowledge.candidates)
        return f"{number} trials of {runnable} candidates were run, a {_share(number, runnable)}"
    return ""


def _same_error(knowledge: Knowledge, ledger: Ledger) -> str:
    """The error that every trial raised; empty if there is none, or an untried candidate might escape it."""
    judged = [(key, entry.merged) for key, entry in ledger if entry.judged]
    reasons = {end.reason if end.status == "raised" else "" for _, end in judged}
    if len(judged) < SAME_ERRORS or len(reasons) > 1:
        return ""
    methods = {one.key: {name for name, _ in one.steps} for one in knowledge.candidates}
    shared = set.intersection(*(methods[key] for key, _ in judged))
    escapes = any(not shared <= methods[knowledge.candidates[index].key] for index in knowledge.open)
    return "" if escapes else reasons.pop()


def _share(number: int, of: int) -> str:
    return "fifth" if number <= of / SHARE_OF_TRIALS else f"share of {number / max(1, of):.0%}"
