"""The objective: the smaller the better, predicted and measured alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from atorch_ns.search.objective import Objective, SearchSettings
from atorch_ns.search.trial import TrialOutcome
from tests.search.fakes import GIB, candidate


def objective(kind: Any, limit_bytes: int = 0) -> Objective:
    return Objective(SearchSettings(objective=kind), limit_bytes)


RAN = TrialOutcome(status="ok", step_seconds=(0.2, 0.2, 0.4), peak_bytes=(GIB, 3 * GIB))


@pytest.mark.parametrize(("kind", "expected"), [("time", 0.2), ("cost", 0.2), ("memory", 3.0 * GIB)])
def test_measured(kind: str, expected: float) -> None:
    assert objective(kind).measured(candidate("a", "ddp"), RAN) == expected


def test_memory_that_was_not_measured_counts_as_predicted() -> None:
    outcome = TrialOutcome(status="ok", step_seconds=(0.1,))
    assert objective("memory").measured(candidate("a", "ddp", peak=2 * GIB), outcome) == 2 * GIB


def test_the_largest_batch_shrinks_by_what_the_estimate_missed() -> None:
    one = candidate("a", "ddp", peak=2 * GIB, largest_batch=64, largest_batch_bytes=8.0 * GIB, given_batch=16)
    exact = TrialOutcome(status="ok", step_seconds=(0.1,), peak_bytes=(2 * GIB,))
    above = TrialOutcome(status="ok", step_seconds=(0.1,), peak_bytes=(4 * GIB,))
    batch = objective("batch", 8 * GIB)
    assert 1 / batch.measured(one, exact) == 64
    # 6 GiB for 48 samples more: 2 GiB too many are 16 samples, in multiples of the given batch.
    assert 1 / batch.measured(one, above) == 48
    assert batch.predicted(one) == 1 / 64
    assert batch.predicted(candidate("b", "ddp")) is None


def test_the_noise_of_one_trial() -> None:
    assert objective("memory").noise(RAN) == 0.0
    assert objective("time").noise(TrialOutcome(status="ok", step_seconds=(0.1,))) == 0.1
    assert 0 <= objective("time").noise(RAN) < math.inf


@pytest.mark.parametrize(
    "wrong", [{"time_limit_s": 0}, {"memory_reserve": 1.0}, {"sampler": "best"}, {"nosuch": 1}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SearchSettings(**wrong)
