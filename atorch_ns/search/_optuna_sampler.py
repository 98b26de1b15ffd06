"""Optuna's samplers over a list of candidates, by ask and tell."""

from __future__ import annotations

from typing import Any, Literal

from atorch_ns.search._features import named_features
from atorch_ns.search._knowledge import Knowledge
from atorch_ns.search._quiet import load_optuna, quiet

__all__ = ["OptunaSampler"]

ABSENT = "off"


class OptunaSampler:
    """TPE or a Gaussian process of Optuna.

    Optuna proposes a setting of every method; the open candidate that agrees with most of it is tried, and
    Optuna is told of that one. Its study lives in memory.

    Args:
        kind: which.
        seed: of its draws.
    """

    learns = True

    def __init__(self, kind: Literal["tpe", "gp"], seed: int) -> None:
        more = ("scipy",) if kind == "gp" else ()  # what its Gaussian process is fitted with
        self._optuna = load_optuna(f"the sampler {kind!r}", *more)
        self._kind = kind
        self._seed = seed

    def next(self, knowledge: Knowledge, open_: list[int], usual_cost_s: float) -> int:
        """The open candidate nearest to what Optuna proposes.

        The study is told all trials anew, so that the proposal depends on nothing but them and the seed.
        """
        optuna = self._optuna
        settings = [named_features(one) for one in knowledge.candidates]
        names = sorted(set().union(*settings))
        domain = optuna.distributions.CategoricalDistribution((ABSENT, "on"))
        space = {name: domain for name in names if 0 < sum(name in one for one in settings) < len(settings)}
        study = self._study(len(knowledge.ranked))
        index_of = {one.key: index for index, one in enumerate(knowledge.candidates)}
        for standing in sorted(knowledge.ranked, key=lambda one: index_of[one.candidate.key]):
            params = {name: settings[index_of[standing.candidate.key]].get(name, ABSENT) for name in space}
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=space, value=standing.value)
            )
        proposed = study.ask(space).params

        def distance(index: int) -> int:
            return sum(settings[index].get(name, ABSENT) != value for name, value in proposed.items())

        return min(open_, key=lambda index: (distance(index), index))

    def _study(self, num_trials: int) -> Any:
        with quiet(self._optuna):
            return self._optuna.create_study(sampler=self._sampler(num_trials))

    def _sampler(self, num_trials: int) -> Any:
        seed = self._seed + 1000 * num_trials
        if self._kind == "tpe":
            return self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
        return self._optuna.samplers.GPSampler(seed=seed, n_startup_trials=4)
