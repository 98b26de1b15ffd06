"""Samplers: which candidate is tried next."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from atorch_ns.search._knowledge import Knowledge
from atorch_ns.search._settings import SearchSettings

__all__ = ["Exhaustive", "Guided", "Random", "Sampler", "make_sampler"]

LEAST_TRIAL_S = 3.0
"""Seconds that any trial is taken to cost, so that set-up counts in proportion."""


class Sampler(Protocol):
    """Chooses among candidates."""

    learns: bool
    """Whether it may stop before all are tried, once the chance of a better one is small."""

    def next(self, knowledge: Knowledge, open_: list[int], usual_cost_s: float) -> int:
        """The index of the next one.

        Args:
            knowledge: all that is known.
            open_: indices to choose from; at least one.
            usual_cost_s: seconds of a trial without special set-up.
        """


class Guided:
    """Expected improvement of the corrected prediction for each second that the trial costs."""

    learns = True

    def next(self, knowledge: Knowledge, open_: list[int], usual_cost_s: float) -> int:
        """The candidate with most to gain; before any result, the best predicted one."""
        mean, deviation = knowledge.belief.mean[open_], knowledge.belief.deviation[open_]
        if not knowledge.ranked:
            gain = np.exp(-(mean - mean.min()))
        else:
            gain = _expected_improvement(math.log(knowledge.ranked[0].value), mean, deviation)
        cost = np.asarray([knowledge.candidates[index].setup_seconds for index in open_])
        usual = max(usual_cost_s, LEAST_TRIAL_S)
        merit = gain * knowledge.chances_to_run[open_] / (1 + cost / usual)
        # Rounded, so that equal candidates are told apart by their order and not by the last bit of a sum.
        return open_[int(np.argmax(np.round(np.log(np.maximum(merit, 1e-300)), 9)))]


class Exhaustive:
    """All of them, in the order in which they are predicted."""

    learns = False

    def next(self, knowledge: Knowledge, open_: list[int], usual_cost_s: float) -> int:
        """The first."""
        return open_[0]


class Random:
    """Any of them.

    Args:
        seed: of the order.
    """

    learns = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def next(self, knowledge: Knowledge, open_: list[int], usual_cost_s: float) -> int:
        """The next one of a shuffled order."""
        order = np.random.default_rng(self._seed).permutation(len(knowledge.candidates))
        return min(open_, key=lambda index: int(order[index]))


def make_sampler(settings: SearchSettings) -> Sampler:
    """The sampler that the settings name.

    Raises:
        MissingPackageError: if it needs a package that is not there.
    """
    if settings.sampler == "guided":
        return Guided()
    if settings.sampler == "exhaustive":
        return Exhaustive()
    if settings.sampler == "random":
        return Random(settings.seed)
    from atorch_ns.search._optuna_sampler import OptunaSampler

    return OptunaSampler(settings.sampler, settings.seed)


def _expected_improvement(best: float, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Of logarithms: E max(best − x, 0) for x ~ N(mean, deviation²)."""
    deviation = np.maximum(deviation, 1e-12)
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = 0.5 * np.asarray([math.erfc(-value / math.sqrt(2)) for value in z])
    improvement: np.ndarray = np.maximum(deviation * (z * below + density), 0.0)
    return improvement
