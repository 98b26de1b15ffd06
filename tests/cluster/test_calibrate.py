"""Measuring devices and links: the fit on made-up times, and the real thing on two ranks."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import pytest

from atorch_ns.cluster import Cluster, calibrate
from atorch_ns.cluster.speed_probes import RING_STEPS, compute_speed, fit_rates, measured_overlap
from atorch_ns.errors import InputError
from atorch_ns.testing import run_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rates_are_found_again_under_noise(num_ranks: int) -> None:
    alpha, bandwidth = 1e-4, 2e9
    times = {}
    for number, (kind, steps) in enumerate(RING_STEPS.items()):
        # A send is one message of the whole tensor; of a ring each rank sends parts to the next.
        messages, parts = (1, 1) if kind == "send" else (steps * (num_ranks - 1), num_ranks)
        for place, size in enumerate((2**12, 2**17, 2**20, 2**23)):
            exact = messages * (alpha + size / parts / bandwidth)
            times[f"{kind}/{size}"] = exact * (1 + 0.05 * math.sin(number + 3 * place))
    rates = fit_rates({**times, "overlap/alone": 1.0}, num_ranks)
    assert set(rates) == set(RING_STEPS)
    for rate in rates.values():
        assert rate.latency_s == pytest.approx(alpha, rel=0.15)
        assert rate.bytes_per_s == pytest.approx(bandwidth, rel=0.15)


def test_times_that_fall_with_size_give_rates_above_zero() -> None:
    rate = fit_rates({"all_reduce/4096": 2e-3, "all_reduce/1048576": 1e-3}, 2)["all_reduce"]
    assert rate.latency_s > 0
    assert 0 < rate.bytes_per_s < 1e13


def test_overlap_is_what_running_both_saves() -> None:
    def of(both: float) -> float:
        return measured_overlap({"overlap/alone": 1.0, "overlap/computing": 2.0, "overlap/both": both})

    assert [of(3.0), of(2.0), of(2.5), of(9.0), of(1.0)] == [0.0, 1.0, 0.5, 0.0, 1.0]


def test_speed_of_computation_from_times() -> None:
    speed = compute_speed(
        {
            "product/float32/100x100x100": 2e-5,
            "product/bfloat16/100x100x100": 1e-5,
            "elements/add/3000000": 1e-3,
            "elements/copy/1000000": 1e-3,
            "in_place/add/3000000": 1e-4,
            "operators/10": 3e-6,
        }
    )
    assert speed.launch_s == pytest.approx(3e-7)
    assert speed.flops_per_s["float32"] == pytest.approx(2e6 / 2e-5, rel=0.02)
    assert speed.flops_per_s["bfloat16"] == pytest.approx(2e6 / 1e-5, rel=0.02)
    assert speed.memory_bytes_per_s == pytest.approx(2e9, rel=0.01)
    assert speed.in_place_bytes_per_s == pytest.approx(3e10, rel=0.01)


def test_gpus_count_at_the_best_shape() -> None:
    times = {
        "product/float32/100x100x100": 2e-5,
        "square/float32/200x200x200": 2e-5,
        "square/float32/10x10x10": 1e-5,
        "elements/add/3000000": 1e-3,
        "in_place/add/3000000": 1e-4,
        "operators/10": 2e-4,  # 20 µs each
    }
    assert compute_speed(times, on_gpu=True).flops_per_s["float32"] == pytest.approx(16e6 / 2e-5)
    # On a CPU a third of a start is taken off, and 200³ is a probe by size.
    assert compute_speed(times).flops_per_s["float32"] == pytest.approx(2e6 / (2e-5 * 2 / 3))


def test_two_ranks_measure_the_same_figures() -> None:
    def measure() -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        hardware = calibrate(Cluster.detect(), seconds=3)
        return asdict(hardware), time.perf_counter() - started

    (first, seconds), (second, _) = run_ranks(measure, 2)
    assert first == second
    assert first["measured"]
    assert first["device"]["source"] == first["within_node"]["source"] == "measured on 2 × cpu"
    assert first["device"]["efficiency"] == 1
    # Wide enough for any machine under any load; what is checked is units.
    assert 1e9 < first["device"]["flops_per_s"]["float32"] < 1e13
    assert 1e8 < first["device"]["memory_bytes_per_s"] < 1e13
    assert 1e-7 < first["device"]["launch_s"] < 1e-3
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast"} <= set(
        first["within_node"]["collectives"]
    )
    assert all(1e6 < rate["bytes_per_s"] < 1e12 for rate in first["within_node"]["collectives"].values())
    assert seconds < 30


def test_one_process_measures_its_device_only() -> None:
    hardware = calibrate(Cluster(), seconds=0.5)
    assert hardware.measured
    assert hardware.device.source == "measured on 1 × cpu"
    assert "measured on" not in hardware.within_node.source
    measured = {
        f"{passes}/{dtype}" for passes in ("forward", "backward") for dtype in ("float32", "bfloat16")
    }
    assert set(hardware.device.attention_factors) == measured
    with pytest.raises(InputError, match="positive"):
        calibrate(Cluster(), seconds=0)
