"""When a trial has run for long enough: a pure function, so that all ranks stop at the same step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from atorch_ns.search import StopRule, TrialOutcome

__all__ = ["Decision", "decide", "half_width"]

Decision = Literal["go on", "enough", "worse"]


def decide(rule: StopRule, times: Sequence[float]) -> Decision:
    """Whether a trial goes on after the steps timed so far.

    Args:
        rule: how long it runs.
        times: seconds of each timed step, the maximum over ranks; the same on every rank.

    Returns:
        ``"worse"`` once the interval of the median lies wholly above that of the best trial; ``"enough"``
        once the median is known precisely enough, or steps or time are used up.
    """
    if len(times) >= 2 and rule.best_seconds is not None:
        best = rule.best_seconds + _normal_quantile(rule.confidence) * rule.best_noise
        # The deviation of a few times is often small by chance; the larger of two measures seldom is.
        spread = max(half_width(times, rule.confidence), _mean_half_width(times, rule.confidence))
        if statistics.median(times) - spread > best:
            return "worse"
    if len(times) >= rule.max_steps or (times and sum(times) >= rule.max_seconds):
        return "enough"
    precise = rule.precision * statistics.median(times) if times else 0.0
    if len(times) >= max(rule.min_steps, 2) and half_width(times, rule.confidence) <= precise:
        return "enough"
    return "go on"


def half_width(times: Sequence[float], confidence: float) -> float:
    """Half the width of the median's interval, in seconds: Student's t times its standard error."""
    error = TrialOutcome(status="ok", step_seconds=tuple(times)).noise_seconds
    return _t_quantile((1 + confidence) / 2, len(times) - 1) * error


def _mean_half_width(times: Sequence[float], confidence: float) -> float:
    """The same from the standard deviation, which outliers widen."""
    error = 1.2533 * statistics.stdev(times) / math.sqrt(len(times))
    return _t_quantile((1 + confidence) / 2, len(times) - 1) * error


def _normal_quantile(confidence: float) -> float:
    return statistics.NormalDist().inv_cdf((1 + confidence) / 2)


def _t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else the expansion in the normal's
    (Abramowitz and Stegun 26.7.5), good to 1% from 3 degrees on at the usual levels."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = statistics.NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
