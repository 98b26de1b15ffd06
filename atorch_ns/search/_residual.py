"""The residual model: what trials teach about predictions, as a Gaussian process over candidates.

The logarithm of measured over predicted is taken to be the sum of a factor common to all candidates, a factor
for each part of the step in proportion to its share, a factor for each method and setting, and a rest of each
candidate's own, all Gaussian with mean zero. With few trials the prior keeps the factors small. The prior's
widths are those of an estimate that has the order of candidates mostly right and the scale possibly not: the
common factor e±1, a part e±0.5, a method ±20%, a candidate ±8%; the scale of all but the first is fitted to
what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atorch_ns.search._features import Features

__all__ = ["Belief", "believe"]

COMMON, PART, MARK, OWN = 1.0, 0.5, 0.2, 0.08
MARK_UNPRICED = 0.4
"""Width of a method's factor where there is no estimate to correct."""

SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Widths that are tried, as factors on those above; far ones are less likely: ±0.5 in the logarithm."""

DRIFT = 0.02
"""Relative standard deviation between two trials of one candidate, as far as their steps do not show it."""

NUM_SAMPLES = 512


@dataclass(frozen=True)
class Belief:
    """What is believed of all candidates' logarithms.

    Attributes:
        mean: [N].
        covariance: [N, N].
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
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        normal = np.random.default_rng(seed).standard_normal((NUM_SAMPLES, len(self.mean)))
        drawn: np.ndarray = self.mean + normal @ root.T
        return drawn


def believe(
    features: Features,
    predicted: np.ndarray,
    tried: np.ndarray,
    measured: np.ndarray,
    noise: np.ndarray,
) -> Belief:
    """The belief after some trials.

    Args:
        features: of the N candidates.
        predicted: [N] logarithms of the predictions; NaN without one.
        tried: [M] indices of candidates that were measured.
        measured: [M] logarithms of what was measured.
        noise: [M] relative standard errors.
    """
    priced = np.isfinite(predicted)
    centre = float(np.median(predicted[priced])) if priced.any() else 0.0
    prior = np.where(priced, predicted, centre)
    fixed, scaled = _kernels(features, priced)
    if len(tried) == 0:
        return Belief(prior, fixed + scaled)
    residual = measured - prior[tried]
    errors = np.diag(noise**2 + DRIFT**2)
    scale = _likeliest(fixed, scaled, tried, residual, errors)
    kernel = fixed + scale**2 * scaled
    gain = np.linalg.solve(kernel[np.ix_(tried, tried)] + errors, kernel[tried]).T
    return Belief(prior + gain @ residual, kernel - gain @ kernel[tried])


def _kernels(features: Features, priced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The covariance of the common factor, and that of all others."""
    number = len(priced)
    mark = MARK if priced.all() else MARK_UNPRICED
    common = np.full((number, number), COMMON**2 if priced.all() else (3 * COMMON) ** 2)
    marks, shares = features.marks - features.marks.mean(axis=0), features.shares
    others = mark**2 * marks @ marks.T + PART**2 * shares @ shares.T + OWN**2 * np.eye(number)
    return common, others


def _likeliest(
    fixed: np.ndarray, scaled: np.ndarray, tried: np.ndarray, residual: np.ndarray, errors: np.ndarray
) -> float:
    """The scale under which the residuals are likeliest, its own prior counted."""
    if len(tried) < 3:
        return 1.0
    block = np.ix_(tried, tried)

    def score(scale: float) -> float:
        covariance = fixed[block] + scale**2 * scaled[block] + errors
        _, determinant = np.linalg.slogdet(covariance)
        fit = residual @ np.linalg.solve(covariance, residual)
        return float(-0.5 * (fit + determinant) - 0.5 * (np.log(scale) / 0.5) ** 2)

    return max(SCALES, key=score)
