"""The choice among measured candidates that noise cannot tell apart."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from atorch_ns.estimate import Intervals
from atorch_ns.search.objective import Objective, SearchSettings
from atorch_ns.search.ranking import (
    RankedCandidate,
    choose,
    drift,
    prefer,
    rank_candidates,
    tied_with_best,
    unsure_gain,
)
from atorch_ns.search.residual_model import DRIFT
from atorch_ns.search.space.candidate import Candidate
from atorch_ns.search.trial import Ledger, TrialOutcome
from tests.search.fakes import GIB, candidate

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


def predicted(
    key: str,
    *methods: str,
    seconds: float,
    peak: float = 1.0,
    axes: tuple[tuple[str, int], ...] = (),
    **more: Any,
) -> Candidate:
    """A candidate that 4 of 5 times takes at most a fifth more or less time, and at most a tenth more memory."""
    one = candidate(key, *methods, seconds=seconds, peak=peak, axes=axes, **more)
    assert one.estimate is not None
    sure = Intervals(time=(0.8, 1.2), memory=(1.0, 1.1), gain=1.07, num_pairs=26)
    return replace(one, estimate=replace(one.estimate, intervals=sure))


def test_gains_that_are_not_believed_do_not_pay_for_axes() -> None:
    cut = predicted("a", "ddp", "cut", seconds=1.0, axes=(("data", 2), ("pipeline", 4)))
    divided = predicted("b", "ddp", "split", seconds=1.01, axes=(("data", 2), ("tensor", 4)))
    plain = predicted("c", "ddp", "compile", "amp", seconds=1.09, axes=(("data", 8),))
    found = prefer([cut, divided, plain], TIME, 0)
    assert found.candidate is plain
    assert (
        "simpler than ddp + cut, which is predicted to be 1.09× as fast (1.00 s against 1.09 s)"
        in found.reason
    )
    assert "a gain of up to 10% is not reliable (from 26 pairs of runs)" in found.reason
    assert prefer([cut, divided], TIME, 0).candidate is divided
    assert prefer([cut, plain], Objective(SearchSettings(objective="memory")), 0).candidate is cut
    slow = predicted("d", "ddp", "compile", "amp", seconds=1.11, axes=(("data", 8),))
    assert prefer([cut, slow], TIME, 0) == (cut, "")
    fewer = predicted("e", "ddp", "amp", seconds=1.15, axes=(("data", 8),))
    assert prefer([plain, fewer], TIME, 0).candidate is fewer


def test_the_more_two_plans_differ_the_larger_a_gain_must_be() -> None:
    known = Intervals(gain=1.1)
    steps = [("mesh", [1]), ("ddp", None), ("amp", "bf16")]
    assert unsure_gain(steps, steps, known) == 1.0
    assert unsure_gain(steps, [("mesh", [2]), *steps[1:]], known) == pytest.approx(1.1)
    assert unsure_gain(steps, [steps[0], ("fsdp", None), steps[2]], known) == pytest.approx(
        1.1
    )  # one for one
    others = [("mesh", [2]), ("fsdp", None), ("cut", None), ("half", None), ("compile", None)]
    assert unsure_gain(steps, others, known) == pytest.approx(1.1 ** math.sqrt(5))


def test_methods_of_the_plain_strategy_do_not_count() -> None:
    sharded, replicated = predicted("a", "fsdp", seconds=1.0), predicted("b", "ddp", seconds=1.01)
    assert prefer([sharded, replicated], TIME, 0).candidate is sharded
    assert prefer([sharded, replicated], TIME, 0, ["ddp"]).candidate is replicated


def test_the_plan_that_may_not_fit_is_compared_with_the_chosen_one() -> None:
    tight = predicted("a", "fsdp", "half", seconds=1.0, peak=9.5 * GIB)
    sure = predicted("b", "fsdp", "half", "compile", seconds=1.1, peak=6 * GIB)
    simple = predicted("c", "fsdp", seconds=1.11, peak=6 * GIB)
    found = prefer([tight, sure, simple], TIME, 10 * GIB)
    assert found.candidate is simple
    assert "1.00 s against 1.11 s" in found.reason


def test_what_fits_for_sure_is_preferred_unless_the_steps_lie_apart() -> None:
    limit = 10 * GIB
    tight = predicted("a", "fsdp", seconds=1.0, peak=9.5 * GIB)
    sure, slow = (predicted(f"b{s}", "fsdp", "checkpoint", seconds=s, peak=6 * GIB) for s in (1.3, 1.6))
    found = prefer([tight, sure, slow], TIME, limit)
    assert found.candidate is sure
    assert (
        "sure to fit, unlike fsdp, which is predicted to need 9.50 GiB (9.50–10.5) of 10.0 GiB"
        in found.reason
    )
    assert "1.30× as fast (1.00 s against 1.30 s)" in found.reason
    assert prefer([tight, slow], TIME, limit) == (tight, "")  # 1.2 s at most against 1.28 s at least
    assert prefer([tight], TIME, limit) == (tight, "")
    assert prefer([tight, sure], TIME, 0) == (tight, "")
    small, larger = predicted("c", "fsdp", seconds=1.0), predicted("d", seconds=1.05, peak=9.5 * GIB)
    assert prefer([small, larger], TIME, limit) == (small, "")  # though simpler
