"""The choice among measured candidates that noise cannot tell apart."""

from __future__ import annotations

import math

import pytest

from atorch_ns.search.objective import Objective, SearchSettings
from atorch_ns.search.ranking import RankedCandidate, choose, drift, rank_candidates, tied_with_best
from atorch_ns.search.residual_model import DRIFT
from atorch_ns.search.trial import Ledger, TrialOutcome
from tests.search.fakes import candidate

TIME = Objective(SearchSettings())


def ranked(
    key: str, *methods: str, value: float, error: float = 0.005, plain: bool = False
) -> RankedCandidate:
    outcome = TrialOutcome(status="ok", step_seconds=(value,) * 4, peak_bytes=(10,))
    return RankedCandidate(candidate(key, *methods, is_baseline=plain), value, error, outcome, 1)


def test_the_simplest_within_the_noise_wins() -> None:
    fast, simple = ranked("a", "fsdp", "checkpoint", value=1.0), ranked("b", "ddp", value=1.005)
    assert tied_with_best([fast, simple]) == [fast, simple]
    assert choose([fast, simple], TIME) is simple


def test_a_simpler_one_that_is_worse_by_more_than_three_per_cent_never_wins() -> None:
    fast = ranked("a", "fsdp", "checkpoint", value=1.0, error=0.5)
    simple = ranked("b", "ddp", value=1.031, error=0.5)
    assert choose([fast, simple], TIME) is fast


def test_the_baseline_wins_as_long_as_noise_explains_the_difference() -> None:
    plain = ranked("p", value=1.1, error=0.1, plain=True)
    assert choose([ranked("a", "fsdp", value=1.0, error=0.1), plain], TIME) is plain
    quiet = ranked("p", value=1.1, error=0.01, plain=True)
    assert choose([ranked("a", "fsdp", value=1.0, error=0.01), quiet], TIME) is not quiet


def test_nothing_measured_is_no_choice() -> None:
    assert choose([], TIME) is None


def test_what_is_over_the_limit_or_failed_is_not_ranked() -> None:
    ledger = Ledger()
    ledger.add("fits", TrialOutcome(status="ok", step_seconds=(2.0,) * 4, peak_bytes=(1, 10)))
    ledger.add("large", TrialOutcome(status="ok", step_seconds=(1.0,) * 4, peak_bytes=(1, 11)))
    ledger.add("failed", TrialOutcome(status="raised"))
    ledger.add("unknown", TrialOutcome(status="ok", step_seconds=(1.0,) * 4))
    known = {key: candidate(key, key) for key in ("fits", "large", "failed")}
    assert [one.candidate.key for one in rank_candidates(known, ledger, TIME, 10)] == ["fits"]
    assert [one.candidate.key for one in rank_candidates(known, ledger, TIME, 0)] == ["large", "fits"]


def test_the_drift_is_learned_from_repetitions() -> None:
    ledger = Ledger()
    assert drift(ledger, TIME) == DRIFT
    for seconds in (1.0, 1.5, 1.0, 1.5):
        ledger.add("a", TrialOutcome(status="ok", step_seconds=(seconds,) * 4))
    # Four trials: three degrees of freedom beside the two of the prior.
    variance = 4 * (math.log(1.5) / 2) ** 2
    assert drift(ledger, TIME) == pytest.approx(math.sqrt((2 * DRIFT**2 + variance) / 5))
    assert drift(ledger, Objective(SearchSettings(objective="memory"))) == 0.0
