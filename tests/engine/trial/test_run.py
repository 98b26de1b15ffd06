"""How long a trial runs."""

from __future__ import annotations

import random
import statistics

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.run import _max_over_ranks, decide, half_width
from atorch_ns.search import StopRule
from atorch_ns.testing.workers import run_ranks

TIMES = st.lists(st.floats(1e-4, 10.0), max_size=30)


@pytest.mark.parametrize(
    ("times", "rule", "expected"),
    [
        ([], StopRule(), "go on"),
        ([0.01], StopRule(), "go on"),
        ([0.010, 0.012, 0.009, 0.011], StopRule(), "go on"),
        ([0.01] * 4, StopRule(), "enough"),
        ([0.01] * 2, StopRule(min_steps=4), "go on"),
        ([0.010, 0.012] * 10, StopRule(max_steps=20), "enough"),
        ([6.0], StopRule(max_seconds=5.0), "enough"),
        ([0.030, 0.031], StopRule(best_seconds=0.020), "worse"),
        ([0.030, 0.060], StopRule(best_seconds=0.020), "go on"),
        ([0.030, 0.031], StopRule(best_seconds=0.020, best_noise=0.01), "go on"),
        ([0.010, 0.011], StopRule(best_seconds=0.020), "go on"),
    ],
)
def test_decisions(times: list[float], rule: StopRule, expected: str) -> None:
    assert decide(rule, times) == expected


@given(TIMES, st.floats(1e-4, 10.0))
def test_it_ends_and_never_stops_what_is_faster(times: list[float], best: float) -> None:
    rule = StopRule(best_seconds=best)
    verdict = decide(rule, times)
    if times and statistics.median(times) <= best:
        assert verdict != "worse"
    if len(times) >= rule.max_steps:
        assert verdict != "go on"


def test_an_equal_one_is_seldom_called_worse() -> None:
    generator = random.Random(1)
    wrong = 0
    for _ in range(400):
        times: list[float] = []
        rule = StopRule(best_seconds=0.020)
        while decide(rule, times) == "go on":
            times += [generator.gauss(0.020, 0.002) for _ in range(rule.block_steps)]
        wrong += decide(rule, times) == "worse"
    assert wrong / 400 < 0.10  # ten looks at 95%, each one-sided


def test_a_slower_one_is_seen_soon() -> None:
    generator = random.Random(2)
    lengths = []
    for _ in range(100):
        times: list[float] = []
        rule = StopRule(best_seconds=0.020)
        while decide(rule, times) == "go on":
            times += [generator.gauss(0.030, 0.003) for _ in range(rule.block_steps)]
        assert decide(rule, times) == "worse"
        lengths.append(len(times))
    assert statistics.mean(lengths) < 8


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (11, 2.228), (31, 2.042)]
)
def test_the_interval_is_students(count: int, quantile: float) -> None:
    """Quantiles of Student's t at 97.5%, from any table."""
    times = [0.01 if number % 2 else 0.02 for number in range(count)]
    middle = statistics.median(times)
    mad = statistics.median(abs(value - middle) for value in times)
    error = 1.2533 * 1.4826 * mad / count**0.5
    if error:
        assert half_width(times, 0.95) / error == pytest.approx(quantile, rel=0.01)


def _maxima_without_gloo() -> list[float]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No backend type associated with device type cpu")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", refuse)
        cluster = Cluster.detect()
        return _max_over_ranks([float(cluster.rank), -float(cluster.rank)], cluster)


def test_ranks_agree_on_maxima_without_a_tensor_that_a_group_of_nccl_cannot_reduce() -> None:
    assert run_ranks(_maxima_without_gloo, 2) == [[1.0, 0.0]] * 2
