"""Spaces whose truth is known, and searches that are replayed in them.

A *truth table* holds for every candidate the steps of several runs. A replayed trial draws its steps from one
run, until its stop rule ends it, so that noise within a run and differences between runs are those that were measured; on request
the machine's drift too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import TypeAdapter

from atorch_ns.engine.trial.run import decide
from atorch_ns.estimate import Estimate, MemoryParts, TimeParts
from atorch_ns.search import (
    Candidate,
    Search,
    SearchOutcome,
    SearchSetting,
    SearchSettings,
    TrialOutcome,
    TrialTask,
)
from atorch_ns.strategy import Step

__all__ = ["Replay", "Truth", "made_up", "recorded", "replay"]

GOOD_ENOUGH = 0.03
"""A choice is right if it is slower than the best by less than this, or than the truth's own noise."""


@dataclass(frozen=True)
class Truth:
    """What every candidate of a space really takes.

    Attributes:
        candidates: with predictions.
        runs: seconds of steps by candidate's key, for each run, at the machine's usual speed.
        drift: by candidate's key, for each run, how much slower than usual the machine was meanwhile, as a factor;
            empty where it always has one speed.
    """

    candidates: tuple[Candidate, ...]
    runs: Mapping[str, Sequence[Sequence[float]]]
    drift: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def seconds(self, key: str) -> float:
        """The middle of the runs' medians."""
        return statistics.median(statistics.median(run) for run in self.runs[key])

    @property
    def best(self) -> float:
        """Seconds of the fastest."""
        return min(self.seconds(one.key) for one in self.candidates)

    @property
    def noise(self) -> float:
        """How far two runs of one candidate are apart, relatively: the middle one of all candidates."""
        apart = [
            abs(math.log(statistics.median(first) / statistics.median(second)))
            for first, second in (runs[:2] for runs in self.runs.values() if len(runs) > 1)
        ]
        return statistics.median(apart) if apart else 0.0

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and true seconds."""
        predicted = [one.estimate.step_seconds if one.estimate else 0.0 for one in self.candidates]
        actual = [self.seconds(one.key) for one in self.candidates]
        ranks = np.stack([np.argsort(np.argsort(values)) for values in (predicted, actual)]).astype(float)
        return float(np.corrcoef(ranks)[0, 1])

    def as_json(self) -> str:
        """What :func:`recorded` reads: candidates with their predictions, without collectives, and the runs."""
        bare = tuple(
            replace(one, estimate=replace(one.estimate, collectives=(), notes=()) if one.estimate else None)
            for one in self.candidates
        )
        return TypeAdapter(Truth).dump_json(Truth(bare, self.runs, self.drift)).decode()


def recorded(text: str) -> Truth:
    """The truth that :meth:`Truth.as_json` wrote."""
    return TypeAdapter(Truth).validate_json(text)


@dataclass(frozen=True)
class Replay:
    """One replayed search.

    Attributes:
        num_trials: that it ran.
        regret: how much slower its choice is than the best, relatively.
        right: whether that is within three per cent or the truth's noise.
        outcome: of the search.
    """

    num_trials: int
    regret: float
    right: bool
    outcome: SearchOutcome


def replay(truth: Truth, *, seed: int, sampler: str = "guided", drifting: bool = False) -> Replay:
    """Searches once.

    Args:
        truth: of the space.
        seed: of the sampler and of what trials draw.
        sampler: of the search.
        drifting: whether a trial's steps are as slow as the machine was when they were measured.
    """
    random = np.random.default_rng(seed)
    settings = SearchSettings(sampler=sampler, seed=seed, probe=False)  # type: ignore[arg-type]
    search = Search(_setting(), settings, truth.candidates, clock=lambda: 0.0)
    while (task := search.ask()) is not None:
        search.tell(task.id, _trial(truth, task, random, drifting))
    outcome = search.outcome()
    assert outcome.best is not None
    regret = float(truth.seconds(outcome.best) / truth.best - 1)
    right = bool(regret <= max(GOOD_ENOUGH, truth.noise))
    return Replay(outcome.num_trials, regret, right, outcome)


def _trial(truth: Truth, task: TrialTask, random: np.random.Generator, drifting: bool) -> TrialOutcome:
    runs = truth.runs[task.key]
    number = int(random.integers(len(runs)))
    factor = truth.drift[task.key][number] if drifting else 1.0
    steps: list[float] = []
    while (verdict := decide(task.rule, steps)) == "go on":
        drawn = random.choice(np.asarray(runs[number]), task.rule.block_steps)
        steps += [float(step) * factor for step in drawn]
    return TrialOutcome(
        status="stopped early" if verdict == "worse" else "ok",
        step_seconds=tuple(steps),
        total_seconds=1.0 + sum(steps),
    )


def _setting() -> SearchSetting:
    return SearchSetting(
        model="Model",
        num_parameters=1,
        world_size=2,
        num_nodes=1,
        device="cpu",
        memory_limit_bytes=0,
        global_batch=8,
        num_tokens=1,
        fingerprint="search_quality",
    )


_SHARDING = (("ddp", 1.0), ("zero1", 1.1), ("zero2", 1.25), ("fsdp", 1.3), ("fsdp_whole", 1.2))
_PRECISION = (("", 1.0), ("amp", 0.8))
_RECOMPUTE = (("", 1.0), ("recompute", 1.3), ("recompute_half", 1.15))
_REPLACED = (("", 1.0), ("replaced", 0.97))
_PASSES = ((1, 1.0), (2, 1.05), (4, 1.1))


def made_up(*, seed: int, method_error: float, own_error: float, jitter: float, drift: float) -> Truth:
    """A space of 180 strategies whose predictions are wrong by random factors.

    Args:
        seed: of all that is random.
        method_error: width of each method's factor, as a standard deviation of its logarithm.
        own_error: of each candidate's.
        jitter: of steps within a run.
        drift: of runs.
    """
    random = np.random.default_rng(seed)
    names = [name for kind in (_SHARDING, _PRECISION, _RECOMPUTE, _REPLACED) for name, _ in kind]
    errors = {name: math.exp(method_error * random.standard_normal()) for name in names if name}
    errors["ddp"] = 1.0
    scale, per_pass = math.exp(random.standard_normal()), math.exp(method_error * random.standard_normal())
    candidates, runs = [], {}
    for *methods, (passes, cost) in itertools.product(_SHARDING, _PRECISION, _RECOMPUTE, _REPLACED, _PASSES):
        used = [name for name, _ in methods if name]
        predicted = 0.1 * cost * math.prod(factor for _, factor in methods)
        actual = predicted * scale * math.prod(errors[name] for name in used) * per_pass ** math.log2(passes)
        actual *= math.exp(own_error * random.standard_normal())
        one = _candidate(used, passes, predicted)
        candidates.append(one)
        medians = actual * np.exp(drift * random.standard_normal(2))
        runs[one.key] = [median * (1 + jitter * random.standard_normal(20)) for median in medians]
    return Truth(tuple(candidates), {key: [list(run) for run in one] for key, one in runs.items()})


def _candidate(methods: Sequence[str], passes: int, seconds: float) -> Candidate:
    steps: tuple[tuple[str, object], ...] = tuple((name, None) for name in methods)
    if passes > 1:
        steps = (*steps, ("passes", {"number": passes}))
    label = " + ".join(str(Step(*step)) for step in steps)
    estimate = Estimate(
        memory=MemoryParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        time=TimeParts(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    )
    return Candidate(key=label, steps=steps, label=label, estimate=estimate, is_baseline=label == "ddp")
