"""Step times are recorded rightly and cost next to nothing."""

from __future__ import annotations

import time

import pytest
import torch

from atorch_ns.job.train_step import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _recorded(durations: list[float], kept: int = 256) -> StepTimes:
    clock = Clock()
    times = StepTimes(torch.device("cpu"), kept=kept, clock=clock)
    for duration in durations:
        clock.now += 100.0  # between steps: not counted
        times.start()
        clock.now += duration
        times.stop()
    return times


def test_the_first_two_steps_are_left_out() -> None:
    assert _recorded([9.0]).summary() is None
    assert _recorded([9.0, 8.0]).seconds == ()
    assert _recorded([9.0, 8.0, 1.0, 2.0]).seconds == pytest.approx((1.0, 2.0))


def test_only_the_last_steps_are_kept() -> None:
    assert _recorded([9.0, 8.0, 1.0, 2.0, 3.0], kept=2).seconds == pytest.approx((2.0, 3.0))


def test_a_step_that_raised_does_not_count() -> None:
    clock = Clock()
    times = StepTimes(torch.device("cpu"), clock=clock)
    for step in range(5):
        times.start()
        clock.now += 1.0
        if step == 3:
            continue  # it raised: nobody stopped it
        times.stop()
    times.stop()  # without a start
    assert times.seconds == pytest.approx((1.0, 1.0))


def test_the_summary_says_n_and_spread() -> None:
    summary = _recorded([9.0, 8.0, 0.010, 0.020, 0.030, 0.040, 0.050]).summary()
    assert summary is not None
    assert summary.num_steps == 5
    assert summary.median_seconds == pytest.approx(0.030)
    assert [summary.p25_seconds, summary.p75_seconds] == pytest.approx([0.020, 0.040])
    assert str(summary) == "30.0 ms (measured, n=5, quartiles 20.0 ms to 40.0 ms)"


def test_one_step_has_a_summary() -> None:
    summary = _recorded([9.0, 8.0, 1.0]).summary()
    assert summary is not None
    assert summary.p25_seconds == summary.p75_seconds == pytest.approx(1.0)


def test_a_step_costs_less_than_twenty_microseconds() -> None:
    times = StepTimes(torch.device("cpu"))
    best = min(_cost(times) for _ in range(5))
    assert best < 20e-6  # a tenth of a percent of a step of 20 ms; measured about 0.5 microseconds


def _cost(times: StepTimes, count: int = 2000) -> float:
    begin = time.process_time()
    for _ in range(count):
        times.start()
        times.stop()
    return (time.process_time() - begin) / count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_measure_the_device_without_waiting() -> None:
    device = torch.device("cuda")
    times = StepTimes(device)
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(6):
        times.start()
        begin = time.perf_counter()
        for _ in range(20):
            matrix = torch.mm(matrix, matrix).clamp(-1, 1)
        launched = time.perf_counter() - begin
        times.stop()
    torch.cuda.synchronize()
    assert len(times.seconds) == 4
    assert min(times.seconds[1:]) > launched  # the device took longer than the launch
