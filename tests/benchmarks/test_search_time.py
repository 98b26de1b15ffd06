"""What a trial costs beyond its steps, and what the page says about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atorch_ns.search import TrialOutcome
from benchmarks._claims import claims_of
from benchmarks._results import Spread
from benchmarks.search_time import CALL_LIMIT_S, TRIAL_LIMIT_S, beyond_steps, warm_rows


def _row(setup: float, total: float, *steps: float, status: Any = "ok") -> Any:
    trial = TrialOutcome(status=status, step_seconds=steps, setup_seconds=setup, total_seconds=total)
    return SimpleNamespace(trial=trial)


def test_steps_that_are_not_timed_are_no_cost_of_the_trial() -> None:
    # Three steps of 0.1 s before the four that are timed, and 0.5 s of anything else.
    assert beyond_steps(_row(0.7, 1.2, 0.1, 0.1, 0.1, 0.1)) == pytest.approx(0.5)


def test_the_trial_that_warms_up_and_those_that_failed_are_left_out() -> None:
    first, second, third = _row(4.0, 5.0, 0.1), _row(0.5, 1.0, 0.1), _row(0.6, 1.0, 0.1)
    failed = _row(9.0, 9.0, status="out of memory")
    untried = SimpleNamespace(trial=None)
    outcome: Any = SimpleNamespace(rows=(second, failed, untried, first, third))
    assert warm_rows(outcome) == [second, third]


def test_claims_name_the_limits() -> None:
    spread = Spread.of([1.4, 1.5, 1.6])
    found = {"low": spread.low, "high": spread.high, "median": spread.median}
    rows = [
        {"name": "call", "n": 1, "seconds": found, "limit": CALL_LIMIT_S, "holds": True},
        {"name": "trial", "n": 3, "seconds": found, "limit": TRIAL_LIMIT_S, "holds": False},
    ]
    call, trial = claims_of({"benchmark": "search_time", "rows": rows})
    assert (call.asked, call.shortfall) == ("≤ 90", "")
    assert trial.asked == "≤ 1"
    assert trial.shortfall.startswith("1.5: a warm trial beyond its steps")
