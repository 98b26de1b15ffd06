"""The time limits of a search and of its trials."""

from __future__ import annotations

import math

from atorch_ns.search.budget import LEAST_DEADLINE_S, LEAST_TRIAL_S, LONG_STEP_S, TimeBudget
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.trial import Ledger, StopRule, TrialOutcome
from tests.search.fakes import Clock, candidate, setting


def budget(clock: Clock | None = None, **limits: float) -> TimeBudget:
    return TimeBudget(setting(profile_seconds=3.0), SearchSettings(**limits), clock or Clock())  # type: ignore[arg-type]


def test_the_profile_counts() -> None:
    clock = Clock()
    limited = budget(clock, time_limit_s=60.0)
    clock.now += 10.0
    assert (limited.elapsed, limited.left) == (13.0, 47.0)
    assert budget().left == math.inf


def test_a_usual_trial_leaves_out_compilation_and_what_was_resumed() -> None:
    ledger = Ledger()
    assert budget().usual_cost({}, ledger) == 0.0
    known = {"a": candidate("a", "compile", setup_seconds=40.0), "b": candidate("b", "ddp")}
    ledger.add("a", TrialOutcome(status="ok", step_seconds=(0.1,), total_seconds=45.0))
    ledger.add("b", TrialOutcome(status="ok", step_seconds=(0.1,), total_seconds=900.0), resumed=True)
    assert budget().usual_cost(known, ledger) == 5.0


def test_the_trial_in_one_process_has_the_time_of_three_usual_ones_or_what_is_left() -> None:
    assert budget().single_deadline(20.0) == 60.0
    assert budget().single_deadline(0.1) == LEAST_DEADLINE_S
    assert budget(time_limit_s=33.0).single_deadline(20.0) == 30.0
    short = budget(time_limit_s=3.5)
    assert short.single_deadline(20.0) == LEAST_DEADLINE_S
    assert short.is_short


def test_cheap_refusals_leave_time_for_what_follows_the_choice() -> None:
    assert budget(time_limit_s=4.2).affords(candidate("a", "ddp"), usual_cost=0.1)
    assert not budget(time_limit_s=4.0).affords(candidate("a", "ddp"), usual_cost=0.1)


def test_a_trial_must_leave_time_for_the_check_of_the_winner() -> None:
    one = candidate("a", "ddp")
    assert budget(time_limit_s=23.0).affords(one, usual_cost=10.0)
    assert not budget(time_limit_s=22.0).affords(one, usual_cost=10.0)
    assert budget(time_limit_s=22.0, probe=False).affords(one, usual_cost=10.0)
    assert not budget(time_limit_s=22.0, probe=False).affords(
        candidate("b", setup_seconds=40.0), usual_cost=10.0
    )


def test_deadlines_shrink_with_the_time_left_but_not_to_nothing() -> None:
    clock = Clock()
    limited = budget(clock, time_limit_s=63.0)
    assert budget().deadline(candidate("a"), StopRule(), None) == 120.0
    assert limited.deadline(candidate("a"), StopRule(), None) == 60.0 + LEAST_DEADLINE_S / 2
    assert limited.is_short
    clock.now += 1000.0
    assert limited.deadline(candidate("a"), StopRule(), None) == LEAST_DEADLINE_S
    assert limited.rule(None, 0.1, times=True).max_seconds == LEAST_TRIAL_S


def test_slow_steps_have_a_longer_deadline_and_one_step_of_warming_up() -> None:
    free, rule = budget(), StopRule(warmup_steps=1, min_steps=4)
    assert free.deadline(candidate("a"), rule, 30.0) == 3 * 30.0 * 5
    assert free.deadline(candidate("a"), rule, 1e6) == 1200.0, "ten times the setting at most"
    assert free.rule(None, LONG_STEP_S, times=True).warmup_steps == 1
    assert free.rule(None, 0.01, times=True).warmup_steps == 2
