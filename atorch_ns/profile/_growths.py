"""Growth: sizes of one or more recordings as functions of B and T.

Legend: B samples, T tokens in each, N sizes. Coefficients are columns (constant, per B, per B·T, per B·T²),
the fields of :class:`Growth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atorch_ns.profile._trace import Growth

__all__ = ["by_divisor", "by_lengths", "by_samples", "growth", "values_at"]


def by_divisor(sizes: Sequence[int], num_samples: int, at: int) -> np.ndarray:
    """[N, 4] coefficients of sizes that were seen with one B that divides only what grows with the batch.

    What is a multiple of B grows with B. A multiple of B² (every sample against every other) has no
    coefficient; it is taken to grow with B so that it is right at ``at``.

    Args:
        sizes: N sizes.
        num_samples: the B that they were seen with.
        at: the user's B.
    """
    exact = np.asarray(sizes, dtype=np.int64)
    whole = exact % num_samples == 0
    square = (exact % num_samples**2 == 0) & (num_samples > 1)
    coefficients = np.zeros((len(exact), 4))
    coefficients[:, 0] = np.where(whole, 0, exact)
    coefficients[:, 1] = np.where(whole, exact / num_samples, 0)
    coefficients[:, 1] *= np.where(square & (num_samples != at), at / num_samples, 1)
    return coefficients


def by_samples(sizes: Sequence[Sequence[int]], num_samples: Sequence[int]) -> np.ndarray:
    """[N, 4] coefficients of sizes seen with two B, N sizes for each."""
    (first, second), (low, high) = np.asarray(sizes, dtype=np.float64), num_samples
    coefficients = np.zeros((len(first), 4))
    coefficients[:, 1] = (second - first) / (high - low)
    coefficients[:, 0] = first - low * coefficients[:, 1]
    return coefficients


def by_lengths(parts: Sequence[np.ndarray], num_tokens: Sequence[int]) -> np.ndarray:
    """[N, 4] coefficients from those that :func:`by_divisor` found at three T; the first T is the user's.

    What grows with T but not with B (a causal mask) is taken as it is at the user's T.
    """
    grown = np.stack([part[:, 1] for part in parts])
    coefficients = np.zeros_like(parts[0])
    coefficients[:, 0] = parts[0][:, 0]
    powers = np.vander(np.asarray(num_tokens, dtype=np.float64), 3, increasing=True)
    coefficients[:, 1:] = np.linalg.solve(powers, grown).T
    return coefficients


def values_at(coefficients: np.ndarray, num_samples: float, num_tokens: float) -> np.ndarray:
    """[N] values of [N, 4] coefficients at B and T."""
    grown = num_samples * num_tokens ** np.arange(3)
    values: np.ndarray = coefficients[:, 0] + coefficients[:, 1:] @ grown
    return values


def growth(
    coefficients: np.ndarray,
    inside: np.ndarray | None = None,
    at: tuple[float, float] = (1, 1),
    words: np.ndarray | None = None,
) -> Growth:
    """One row of coefficients as a :class:`Growth`; what rounding left behind is 0.

    Args:
        coefficients: [4].
        inside: [4] of the part that tensor parallelism divides.
        at: the B and T at which its share is taken.
        words: [4] of the part between the head and the loss.
    """
    largest = float(np.abs(coefficients).max())
    found = Growth(*(0.0 if abs(value) < 1e-9 * largest else float(value) for value in coefficients))
    whole = float(values_at(coefficients[None], *at)[0])

    def share(of: np.ndarray | None) -> float:
        if of is None or not of.any() or whole <= 0:
            return 0.0
        return min(1.0, max(0.0, float(values_at(of[None], *at)[0]) / whole))

    return replace(found, divided=share(inside), words=share(words))
