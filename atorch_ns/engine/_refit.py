"""Refit: what trials and training measured corrects the figures that the next estimate uses.

The estimate of a step is split in two: what is computed (forward, backward, recomputation, update, starting
operators) and what is communicated (gathering, reducing, moving to the host). For each precision ``p``

    measured ≈ compute_factor[p] · computed + communication_factor · communicated

The factors are found by least squares on the logarithms of the two sides, drawn towards 1 by a prior worth
one observation in ten: a single trial moves them most of the way where it says something about them, and
leaves those that it says nothing about. Memory has one factor for each precision, the median of measured over
predicted peaks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from atorch_ns.engine._calibration import Calibration, Factors, computed_and_communicated
from atorch_ns.errors import AtorchError, InputError
from atorch_ns.method import Chosen, Registry, fold_plan, load_registry
from atorch_ns.search import Candidate, SearchOutcome, TrialOutcome

__all__ = ["refit"]

_PRIOR: Final = 0.1
"""Weight of the prior that factors are 1, in observations."""
_RANGE: Final = (0.05, 20.0)
"""Factors beyond this mean that the figures are of another machine."""
_ROUNDS: Final = 30


class _Observation(NamedTuple):
    precision: str
    computed: float
    communicated: float
    measured: float
    weight: float


def refit(
    outcome: SearchOutcome, actual: TrialOutcome | None = None, *, registry: Registry | None = None
) -> Calibration:
    """What a search's trials, and training with its winner, say about the estimate.

    Args:
        outcome: the search.
        actual: steps of training with the winner, in the form of a trial; ``None`` for the trials alone.
            They count as much as all trials together, for they are many and undisturbed.
        registry: the methods, to read off a candidate in which precision it computes; ``None`` for all that
            are installed.

    Returns:
        The factors of the search's device. They are relative to the figures that the search priced with.

    Raises:
        InputError: if nothing was measured that was also predicted.
    """
    known = load_registry() if registry is None else registry
    pairs = [(row.candidate, row.trial, 1.0) for row in outcome.rows if row.trial is not None]
    num_trials = sum(trial.succeeded for _, trial, _ in pairs)
    if actual is not None and outcome.winner is not None:
        pairs.append((outcome.winner.candidate, actual, float(max(1, num_trials))))
    times: list[_Observation] = []
    peaks: dict[str, list[float]] = {}
    for candidate, measured, weight in pairs:
        predicted = candidate.estimate
        if predicted is None:
            continue
        precision = _precision(candidate, known)
        if measured.succeeded and predicted.step_seconds > 0:
            parts = computed_and_communicated(predicted)
            times.append(_Observation(precision, *parts, measured.median_seconds, weight))
        if measured.peak_bytes and predicted.peak_bytes > 0:
            peaks.setdefault(precision, []).append(max(measured.peak_bytes) / predicted.peak_bytes)
    if not times and not peaks:
        raise InputError(
            "no candidate of the search was both priced and measured, so there is nothing to learn."
        )
    compute, communication = _fit(times)
    factors = Factors(
        compute=MappingProxyType(compute),
        communication=communication,
        memory=MappingProxyType({name: _clamped(statistics.median(found)) for name, found in peaks.items()}),
        num_trials=num_trials,
        num_steps=0 if actual is None else len(actual.step_seconds),
        error_before=_error(times, {}, 1.0),
        error_after=_error(times, compute, communication),
    )
    key = Calibration.key(outcome.setting.device, outcome.setting.world_size)
    return Calibration(devices=MappingProxyType({key: factors}))


def _precision(candidate: Candidate, registry: Registry) -> str:
    chosen = []
    for name, config in candidate.steps:
        if name in registry:
            method = registry.get(name)
            chosen.append(Chosen(method, method.Config.model_validate(config)))
    try:
        plan = fold_plan(chosen)
    except AtorchError:
        return "float32"
    return plan.compute_dtype or plan.parameter_dtype


def _fit(observed: Sequence[_Observation]) -> tuple[dict[str, float], float]:
    """Factors of computation by precision, and of communication: Gauss-Newton on their logarithms."""
    names = sorted({one.precision for one in observed})
    theta = np.zeros(len(names) + 1)
    for _ in range(_ROUNDS if observed else 0):
        rows, targets, weights = [], [], []
        for one in observed:
            place = names.index(one.precision)
            computed = math.exp(theta[place]) * one.computed
            communicated = math.exp(theta[-1]) * one.communicated
            total = computed + communicated
            row = np.zeros(len(theta))
            row[place], row[-1] = computed / total, communicated / total
            rows.append(row)
            targets.append(math.log(one.measured / total) + row @ theta)
            weights.append(one.weight)
        design, weight = np.array(rows), np.array(weights)
        normal = design.T @ (weight[:, None] * design) + _PRIOR * np.eye(len(theta))
        update = np.linalg.solve(normal, design.T @ (weight * np.array(targets)))
        theta = np.clip(update, math.log(_RANGE[0]), math.log(_RANGE[1]))
    return {name: math.exp(theta[place]) for place, name in enumerate(names)}, math.exp(theta[-1])


def _error(observed: Sequence[_Observation], compute: Mapping[str, float], communication: float) -> float:
    errors = [
        abs(
            (compute.get(one.precision, 1.0) * one.computed + communication * one.communicated) / one.measured
            - 1
        )
        for one in observed
    ]
    return statistics.median(errors) if errors else 0.0


def _clamped(value: float) -> float:
    return min(max(value, _RANGE[0]), _RANGE[1])
