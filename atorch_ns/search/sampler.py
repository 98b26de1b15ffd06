"""Samplers: which candidate of a search is tried next."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from atorch_ns.errors import MissingPackageError
from atorch_ns.search.knowledge import Knowledge
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.space.candidate import named_features

LEAST_TRIAL_S = 3.0  # least assumed cost of a trial in seconds, so that set-up counts in proportion

Sampler = Callable[[Knowledge, list[int], float], int]
"""Chooses the next index from the knowledge, the open indices (at least one) and a usual trial's seconds."""


def make_sampler(settings: SearchSettings) -> Sampler:
    """The sampler that the settings name.

    Raises:
        MissingPackageError: if it needs Optuna, which is not installed.
    """
    if settings.sampler == "guided":
        return choose_candidate
    if settings.sampler == "exhaustive":
        return lambda knowledge, open_, usual_cost_s: open_[0]  # in the order in which they are predicted
    if settings.sampler == "random":
        return lambda knowledge, open_, usual_cost_s: _first_shuffled(knowledge, open_, settings.seed)
    return OptunaSampler(settings.sampler, settings.seed).next


def choose_candidate(knowledge: Knowledge, open_: list[int], usual_cost_s: float) -> int:
    """Returns the candidate with most expected improvement per trial second; at first the best predicted."""
    mean, deviation = knowledge.posterior.mean[open_], knowledge.posterior.deviation[open_]
    if not knowledge.ranked:  # there is no best to improve on
        gain = np.exp(-(mean - mean.min()))
    else:
        gain = _expected_improvement(math.log(knowledge.ranked[0].value), mean, deviation)
    cost = np.asarray([knowledge.candidates[index].setup_seconds for index in open_])
    usual = max(usual_cost_s, LEAST_TRIAL_S)
    merit = gain * knowledge.chances_to_run[open_] / (1 + cost / usual)
    # Rounded, so that equal candidates differ by their order and not by the last bit of a sum.
    return open_[int(np.argmax(np.round(np.log(np.maximum(merit, 1e-300)), 9)))]


def _first_shuffled(knowledge: Knowledge, open_: list[int], seed: int) -> int:
    order = np.random.default_rng(seed).permutation(len(knowledge.candidates))
    return min(open_, key=lambda index: int(order[index]))


def _expected_improvement(best: float, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """E max(best − x, 0) for x ~ N(mean, deviation²), all in logarithms."""
    deviation = np.maximum(deviation, 1e-12)  # 0 would divide by zero
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)  # φ(z), and below Φ(z)
    below = 0.5 * np.asarray([math.erfc(-value / math.sqrt(2)) for value in z])
    improvement: np.ndarray = np.maximum(deviation * (z * below + density), 0.0)
    return improvement


ABSENT = "off"  # of a method or a setting that a candidate does not have


class OptunaSampler:
    """TPE or a Gaussian process of Optuna.

    Optuna proposes a setting of every method; the open candidate that agrees with most of it is tried, and
    Optuna learns of that one. Its study lives in memory.

    Args:
        kind: ``"tpe"``, or ``"gp"`` for the Gaussian process.
        seed: seed of its draws.

    Raises:
        MissingPackageError: if Optuna is not installed, or scipy for the Gaussian process.
    """

    def __init__(self, kind: Literal["tpe", "gp"], seed: int) -> None:
        self._optuna = _load_optuna(kind)
        self._kind = kind
        self._seed = seed

    def next(self, knowledge: Knowledge, open_: list[int], usual_cost_s: float) -> int:
        """Returns the open candidate nearest to Optuna's proposal.

        A new study gets all trials, so that the proposal depends on nothing but them and the seed.
        """
        optuna = self._optuna
        settings = [named_features(entry) for entry in knowledge.candidates]
        names = sorted(set().union(*settings))
        domain = optuna.distributions.CategoricalDistribution((ABSENT, "on"))
        space = {name: domain for name in names if 0 < sum(name in each for each in settings) < len(settings)}
        # In the candidates' order, not that of the trials: the same trials give the same proposal.
        study = self._create_study(len(knowledge.ranked))
        index_of = {entry.key: index for index, entry in enumerate(knowledge.candidates)}
        for result in sorted(knowledge.ranked, key=lambda entry: index_of[entry.candidate.key]):
            params = {name: settings[index_of[result.candidate.key]].get(name, ABSENT) for name in space}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=result.value))
        proposal = study.ask(space).params  # may be no candidate: methods exclude each other

        def distance(index: int) -> int:
            return sum(settings[index].get(name, ABSENT) != value for name, value in proposal.items())

        return min(open_, key=lambda index: (distance(index), index))

    def _create_study(self, num_trials: int) -> Any:
        samplers = self._optuna.samplers
        make = samplers.TPESampler if self._kind == "tpe" else samplers.GPSampler
        with _silence_optuna(self._optuna):
            sampler = make(seed=self._seed + 1000 * num_trials, n_startup_trials=4)  # new draws each time
            return self._optuna.create_study(sampler=sampler)


def _load_optuna(kind: str) -> Any:
    for package in ("optuna", "scipy") if kind == "gp" else ("optuna",):
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                package, needed_by=f"the sampler {kind!r}", install="pip install 'atorch-ns[optuna]'"
            )
    return importlib.import_module("optuna")  # takes half a second, so only where it is used


@contextlib.contextmanager
def _silence_optuna(optuna: Any) -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()  # of the whole process, so it is restored
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
