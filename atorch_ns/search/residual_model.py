"""The residual model: what trials teach about predictions, as a Gaussian process over candidates.

The logarithm of measured over predicted is taken to be the sum of a factor common to all candidates, a factor
for each part of the step in proportion to its share, a factor for each method and setting, and a rest of each
candidate's own, all Gaussian with mean zero. With few trials the prior keeps the factors small. The prior's
widths are those of an estimate that has the order of candidates mostly right and the scale possibly not: the
common factor e±1, a part e±0.5, a method ±20%, a candidate ±8%; the scale of all but the first is fitted to
what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atorch_ns.estimate import TimeParts
from atorch_ns.search.space.candidate import Candidate, named_features

COMMON, PART, MARK, OWN = 1.0, 0.5, 0.2, 0.08  # standard deviations of logarithms: the widths named above
MARK_UNPRICED = 0.4  # width of a method's factor where there is no estimate to correct
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)  # factors on these widths; far ones are less likely: ±0.5 in the logarithm
DRIFT = 0.02  # relative standard deviation between trials of one candidate, beyond that of their steps
NUM_SAMPLES = 512  # S, draws of all candidates together


@dataclass(frozen=True)
class Features:
    """Features by which the N candidates of a search resemble each other.

    Attributes:
        indicators: [N, K] 1 where a candidate has a method or setting; features common to all are left out.
        shares: [N, P] shares of the parts in the predicted step, less their means; zeros without estimates.
        methods: the names of the methods of each candidate.
    """

    indicators: np.ndarray
    shares: np.ndarray
    methods: tuple[frozenset[str], ...]


def read_features(candidates: Sequence[Candidate]) -> Features:
    """The features of these candidates."""
    sets = [set(named_features(entry)) for entry in candidates]
    common = set.intersection(*sets) if sets else set()  # features of all tell no two apart
    names = sorted(set().union(*sets) - common)
    indicators = np.asarray([[float(name in entry) for name in names] for entry in sets])
    times = [entry.estimate.time if entry.estimate is not None else None for entry in candidates]
    num_parts = len(TimeParts._fields)
    shares = np.asarray(
        [
            [part / time.total for part in time] if time is not None and time.total > 0 else [0.0] * num_parts
            for time in times
        ]
    ).reshape(len(sets), num_parts)
    has_time = np.asarray([time is not None for time in times], dtype=bool)
    if has_time.any():
        shares = np.where(has_time[:, None], shares - shares[has_time].mean(axis=0), 0.0)
    methods = tuple(frozenset(name for name, _ in entry.steps) for entry in candidates)
    return Features(indicators.reshape(len(sets), len(names)), shares, methods)


@dataclass(frozen=True)
class Posterior:
    """The joint distribution of all N candidates' logarithms after some trials.

    Attributes:
        mean: [N] expected values.
        covariance: [N, N] covariances.
    """

    mean: np.ndarray
    covariance: np.ndarray

    @property
    def deviation(self) -> np.ndarray:
        """[N] standard deviations."""
        deviation: np.ndarray = np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return deviation

    def samples(self, seed: int) -> np.ndarray:
        """[S, N] draws from the joint distribution; the same for the same seed."""
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))  # root @ root.T is the covariance
        normal = np.random.default_rng(seed).standard_normal((NUM_SAMPLES, len(self.mean)))
        draws: np.ndarray = self.mean + normal @ root.T
        return draws


def fit_posterior(
    features: Features, predictions: np.ndarray, indices: np.ndarray, values: np.ndarray, *, noise: np.ndarray
) -> Posterior:
    """The posterior after some trials.

    Args:
        features: features that the N candidates share.
        predictions: [N] logarithms of the predictions; NaN without one.
        indices: [M] indices of candidates that were measured.
        values: [M] logarithms of the measurements.
        noise: [M] relative standard errors, drift between trials included.
    """
    has_prediction = np.isfinite(predictions)
    centre = float(np.median(predictions[has_prediction])) if has_prediction.any() else 0.0
    prior = np.where(has_prediction, predictions, centre)
    common, others = _covariance_kernels(features, has_prediction)
    if len(indices) == 0:
        return Posterior(prior, common + others)
    residual = values - prior[indices]
    errors = np.diag(noise**2)
    scale = _likeliest_scale(common, others, indices, residual, errors=errors)
    kernel = common + scale**2 * others
    if scale < 1:  # good predictions of others say nothing about an untried method
        offsets = features.indicators - features.indicators.mean(axis=0)
        unknown = offsets[:, ~features.indicators[indices].any(axis=0)]  # features that no trial had
        kernel += (1 - scale**2) * _indicator_deviation(has_prediction) ** 2 * unknown @ unknown.T
    # The Gaussian conditioned on the residuals of the trials; gain is [N, M].
    gain = np.linalg.solve(kernel[np.ix_(indices, indices)] + errors, kernel[indices]).T
    return Posterior(prior + gain @ residual, kernel - gain @ kernel[indices])


def _covariance_kernels(features: Features, has_prediction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    number = len(has_prediction)
    # Without estimates the common factor is the unknown scale itself: three times as wide.
    common = np.full((number, number), COMMON**2 if has_prediction.all() else (3 * COMMON) ** 2)
    indicators, shares = features.indicators - features.indicators.mean(axis=0), features.shares
    others = (
        _indicator_deviation(has_prediction) ** 2 * indicators @ indicators.T
        + PART**2 * shares @ shares.T
        + OWN**2 * np.eye(number)
    )
    return common, others  # [N, N] each


def _indicator_deviation(has_prediction: np.ndarray) -> float:
    return MARK if has_prediction.all() else MARK_UNPRICED


def _likeliest_scale(
    common: np.ndarray, others: np.ndarray, indices: np.ndarray, residual: np.ndarray, *, errors: np.ndarray
) -> float:
    if len(indices) < 3:  # too few to tell
        return 1.0
    block = np.ix_(indices, indices)

    def score(scale: float) -> float:
        covariance = common[block] + scale**2 * others[block] + errors
        _, determinant = np.linalg.slogdet(covariance)
        fit = residual @ np.linalg.solve(covariance, residual)
        return float(-0.5 * (fit + determinant) - 0.5 * (np.log(scale) / 0.5) ** 2)  # and its prior

    return max(SCALES, key=score)
