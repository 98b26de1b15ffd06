from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atorch_ns.search import (
    BesideTensors,
    Candidate,
    Search,
    SearchOutcome,
    SearchSettings,
    TrialOutcome,
    TrialTask,
    outcome_from_json,
    outcome_to_json,
)
from atorch_ns.search.budget import LEAST_DEADLINE_S
from atorch_ns.search.search import Known
from atorch_ns.search.space.candidate import Pruned
from atorch_ns.text import seconds_text
from tests.search.fakes import GIB, World, candidate, setting

PLAIN = candidate("plain", "ddp", seconds=0.030, peak=4 * GIB, is_baseline=True)


def ladder(number: int, *, step: float = 0.001) -> list[Candidate]:
    """The plain strategy and others, each predicted a little faster than the one before."""
    others = [
        candidate(f"c{index}", ("fsdp", {"level": index}), seconds=0.030 - step * (index + 1), peak=2 * GIB)
        for index in range(number)
    ]
    return [PLAIN, *others]


def as_predicted(candidates: list[Candidate], factor: float = 1.0) -> dict[str, float]:
    return {one.key: factor * one.estimate.step_seconds for one in candidates if one.estimate}


def fates(outcome: SearchOutcome) -> dict[str, str]:
    return {row.candidate.key: row.fate for row in outcome.rows}


def reason(outcome: SearchOutcome, key: str) -> str:
    return next(row.reason for row in outcome.rows if row.candidate.key == key)


# ---- which one wins


def test_the_faster_of_two_wins_through_jitter() -> None:
    """20 ms against 30 ms with 10% jitter, whatever is predicted."""
    for predicted in (0.020, 0.030, 0.035):
        pair = [PLAIN, candidate("other", "fsdp", seconds=predicted)]
        wins = [
            World({"plain": 0.030, "other": 0.020}, jitter=0.1, drift=0.03, seed=seed).search(pair).best
            for seed in range(20)
        ]
        assert wins.count("other") >= 19, predicted


@pytest.mark.parametrize("max_trials", [None, 5])
def test_the_last_trials_of_a_search_that_could_go_on_repeat_the_best_and_its_rival(
    max_trials: int | None,
) -> None:
    candidates = ladder(44, step=0.0001)
    impossible = Pruned(kind="impossible", reason="a method refuses it")
    refused = replace(candidates[-1], key="refused", estimate=None, pruned=impossible)
    world = World(as_predicted(candidates), jitter=0.05, drift=0.02)
    outcome = world.search([*candidates, refused], win_probability=1e-9, max_trials=max_trials)
    tried = [task.key for task in world.tasks if task.kind == "trial"]
    assert len(tried) == (max_trials or 9)
    *explored, first, second = tried
    assert len(set(explored)) == len(explored)
    assert {first, second} <= set(explored)
    assert "the remaining ones repeat" in outcome.stop_reason


def test_a_search_of_few_trials_keeps_none_of_them_to_repeat() -> None:
    candidates = ladder(44, step=0.0001)
    world = World(as_predicted(candidates), jitter=0.05, drift=0.02)
    world.search(candidates, win_probability=1e-9, max_trials=4)
    assert len({task.key for task in world.tasks if task.kind == "trial"}) == 4


def test_equal_strategies_never_beat_the_plain_one_by_noise() -> None:
    others = [candidate(f"o{index}", "fsdp", ("x", {"n": index}), seconds=0.030) for index in range(5)]
    wins = [
        World(
            dict.fromkeys(["plain", *(one.key for one in others)], 0.030), jitter=0.05, drift=0.02, seed=seed
        )
        .search([PLAIN, *others])
        .best
        for seed in range(20)
    ]
    assert wins.count("plain") >= 18


def test_of_equal_strategies_the_simplest_wins() -> None:
    simple, rich = candidate("simple", "fsdp"), candidate("rich", "fsdp", "zero", ("x", {"n": 1}))
    outcome = World({"plain": 0.030, "simple": 0.0201, "rich": 0.02}, jitter=0.02).search(
        [PLAIN, rich, simple]
    )
    assert outcome.best == "simple"
    assert "not better beyond the noise" in reason(outcome, "simple")
    assert "is simpler" in reason(outcome, "rich")


def test_what_is_clearly_better_wins_though_it_is_not_simple() -> None:
    simple, rich = candidate("simple", "fsdp"), candidate("rich", "fsdp", "zero", ("x", {"n": 1}))
    outcome = World({"plain": 0.030, "simple": 0.022, "rich": 0.02}, jitter=0.08).search(
        [PLAIN, rich, simple]
    )
    assert outcome.best == "rich"


def test_least_memory_wins_if_that_is_the_objective() -> None:
    small = candidate("small", "fsdp", seconds=0.06, peak=GIB)
    outcome = World({"plain": 0.03, "small": 0.06}, peaks={"plain": 4 * GIB, "small": GIB}).search(
        [PLAIN, small], objective="memory"
    )
    assert outcome.best == "small"
    assert "300% more memory" in reason(outcome, "plain")


def test_the_largest_batch_wins_if_that_is_the_objective() -> None:
    pair = [
        replace(PLAIN, largest_batch=64),
        replace(candidate("wide", "fsdp", seconds=0.04), largest_batch=256),
    ]
    peaks = {"plain": 4 * GIB, "wide": GIB}
    outcome = World({"plain": 0.03, "wide": 0.04}, peaks=peaks).search(pair, objective="batch")
    assert outcome.best == "wide"


def test_the_same_seed_and_measurements_give_the_same_search() -> None:
    candidates = ladder(30)

    def one() -> tuple[list[str], str | None]:
        world = World(as_predicted(candidates, 1.3), jitter=0.1, drift=0.05, seed=3)
        outcome = world.search(candidates, seed=5)
        return [task.key for task in world.tasks], outcome.best

    assert one() == one()


# ---- order and end


def test_the_plain_strategy_is_tried_first_then_the_most_promising() -> None:
    candidates = ladder(20)
    world = World(as_predicted(candidates, 2.0), jitter=0.01)
    outcome = world.search(candidates, win_probability=0.05)
    assert [task.key for task in world.tasks][:2] == ["plain", "c19"]
    assert outcome.best == "c19"
    assert outcome.num_trials <= 6
    assert "chance that any untried candidate" in outcome.stop_reason


def test_trials_teach_about_what_resembles_them() -> None:
    """Everything with 'slow' takes five times as long as predicted: after one, the others are left alone."""
    slow = [candidate(f"s{n}", "slow", ("x", {"n": n}), seconds=0.020 + n * 1e-4) for n in range(10)]
    good = [candidate(f"g{n}", "good", ("x", {"n": n}), seconds=0.024 + n * 1e-4) for n in range(10)]
    truth = {**as_predicted([PLAIN, *good]), **as_predicted(slow, 5.0)}
    world = World(truth, jitter=0.02)
    outcome = world.search([PLAIN, *slow, *good])
    assert outcome.best in {one.key for one in good[:3]}
    assert sum(task.key.startswith("s") for task in world.tasks) <= 2
    row = next(row for row in outcome.rows if row.candidate.key == "s9")
    assert row.fate == "untried"
    assert row.corrected_seconds is not None
    assert row.corrected_seconds > 0.045
    assert "× as long" in row.reason
    assert "not tried: " in row.reason


def test_at_most_a_fifth_is_tried_unless_told_otherwise() -> None:
    candidates = ladder(59, step=0.0001)
    world = World(as_predicted(candidates), jitter=0.1, drift=0.1)
    assert world.search(candidates).num_trials <= 12
    assert World(as_predicted(candidates)).search(candidates, max_trials=3).num_trials == 3


@pytest.mark.parametrize("sampler", ["exhaustive", "random", "tpe", "gp"])
def test_samplers_find_the_best_of_a_few(sampler: str) -> None:
    candidates = ladder(5, step=0.003)
    world = World(as_predicted(candidates), jitter=0.01)
    outcome = world.search(candidates, sampler=sampler, seed=1)
    assert outcome.best in ("c4", "c3")
    assert world.tasks[0].key == "plain"
    if sampler == "exhaustive":
        assert outcome.num_trials == len(candidates)
        assert outcome.stop_reason == "every candidate was tried"


def test_the_time_limit_counts_the_profile_and_is_kept() -> None:
    candidates = ladder(40)
    world = World(as_predicted(candidates), jitter=0.2, drift=0.2)
    outcome = world.search(
        candidates,
        setting_=setting(profile_seconds=4.0),
        time_limit_s=8.0,
        max_trials=100,
        win_probability=1e-6,
    )
    assert "time limit of 8 s" in outcome.stop_reason
    assert outcome.seconds <= 8.0 + 1.0
    assert outcome.best is not None


def test_a_trial_that_needs_more_time_than_is_left_is_not_begun() -> None:
    slow = replace(candidate("slow", "compile", seconds=0.001), setup_seconds=60.0)
    world = World({"plain": 0.03, "slow": 0.001})
    outcome = world.search([PLAIN, slow], time_limit_s=20.0)
    assert fates(outcome)["slow"] == "untried"
    assert outcome.stop_reason == "the time limit of 20 s allowed 1 trial"


def _first_hangs(time_limit_s: float) -> SearchOutcome:
    now = 0.0
    search = Search(
        setting(), SearchSettings(time_limit_s=time_limit_s), [PLAIN, *ladder(3)], clock=lambda: now
    )
    task = search.ask()
    assert task is not None
    now = task.deadline_s
    search.tell(task.id, TrialOutcome(status="hung", reason="it slept", total_seconds=now))
    now = time_limit_s
    assert search.ask() is None
    return search.outcome()


def test_a_first_trial_that_the_time_limit_ended_is_not_held_against_it() -> None:
    outcome = _first_hangs(20.0)
    assert outcome.best == "plain"
    assert "before anything was measured (the time limit of 20 s" in reason(outcome, "plain")
    assert "it was not done when the time limit of 20 s ended, 25 s after it began" in reason(
        outcome, "plain"
    )


def test_a_first_trial_that_hangs_by_itself_is() -> None:
    outcome = _first_hangs(1000.0)
    assert outcome.best is None
    assert "it slept" in reason(outcome, "plain")


def test_cancelling_keeps_the_best_so_far() -> None:
    candidates = ladder(25)
    world = World(as_predicted(candidates))
    search = Search(setting(), SearchSettings(), candidates, clock=world.clock)
    for _ in range(2):
        task = search.ask()
        assert task is not None
        search.tell(task.id, world.run(task))
    running = search.ask()
    assert running is not None
    assert search.outcome().checks == ()
    search.cancel("interrupted from the keyboard")
    search.tell(running.id, world.run(running))
    assert search.ask() is None
    assert search.outcome().best == "c24"
    assert search.outcome().stop_reason == "interrupted from the keyboard"
    assert search.outcome().num_trials == 2
    unchecked = "numerics against one process, with SGD: could not be run: interrupted from the keyboard"
    assert search.outcome().unchecked == unchecked


def test_a_task_is_handed_out_until_it_is_told_and_stale_reports_are_ignored() -> None:
    world = World({"plain": 0.03, "c0": 0.02})
    search = Search(setting(), SearchSettings(), ladder(1), clock=world.clock)
    first = search.ask()
    assert first is not None
    assert search.ask() is first
    search.tell(first.id + 7, TrialOutcome(status="raised"))
    search.tell(first.id, world.run(first))
    search.tell(first.id, TrialOutcome(status="raised"))
    assert fates(search.outcome())["plain"] == "won"


def test_later_trials_know_the_best_and_may_end_early() -> None:
    world = World(as_predicted(ladder(3)), jitter=0.01)
    world.search(ladder(3))
    first, second = world.tasks[:2]
    assert first.rule.best_seconds is None
    assert second.rule.best_seconds == pytest.approx(0.030, rel=0.05)
    assert second.rule.best_noise > 0


def test_deadlines_follow_the_settings_slow_steps_and_the_time_left() -> None:
    slow = candidate("slow", "fsdp", seconds=25.0)
    plain = candidate("plain", "ddp", seconds=20.0, is_baseline=True)
    world = World({"plain": 20.0, "slow": 25.0})
    world.search([plain, slow], trial_deadline_s=60.0)
    deadlines = {task.key: task.deadline_s for task in world.tasks if task.kind == "trial"}
    assert deadlines["plain"] == 60.0
    assert deadlines["slow"] > 3 * 25.0 * 4
    world = World({"plain": 0.03})
    world.search([PLAIN], time_limit_s=20.0)
    assert world.tasks[0].deadline_s <= 25.0


def test_a_close_rival_is_run_once_more() -> None:
    candidates = [PLAIN, candidate("close", "fsdp", seconds=0.0285), candidate("far", "zero", seconds=0.2)]
    world = World(as_predicted(candidates), jitter=0.02)
    world.search(candidates)
    keys = [task.key for task in world.tasks if task.kind == "trial"]
    assert keys.count("plain") == 2
    assert keys.count("close") == 2


# ---- failures


@pytest.mark.parametrize("status", ["raised", "hung", "non-finite", "refused"])
def test_a_failed_trial_is_a_row_and_the_search_goes_on(status: str) -> None:
    candidates = ladder(4, step=0.002)
    end = TrialOutcome(status=status, reason="ValueError: no", rank=1, log="/tmp/r1.log")  # type: ignore[arg-type]
    outcome = World(as_predicted(candidates), ends={"c3": end}).search(candidates)
    assert fates(outcome)["c3"] == "failed"
    assert reason(outcome, "c3") == f"{status} on rank 1: ValueError: no (log: /tmp/r1.log)"
    assert outcome.best == "c2"


@pytest.mark.parametrize("status", ["died", "cancelled"])
def test_what_is_not_its_fault_gets_one_more_attempt(status: str) -> None:
    candidates = ladder(2, step=0.005)
    end = TrialOutcome(status=status, reason="killed by signal 9")  # type: ignore[arg-type]
    world = World(as_predicted(candidates), ends={"c1": end})
    outcome = world.search(candidates)
    attempts = [task.attempt for task in world.tasks if task.key == "c1"]
    assert attempts == [0, 1]
    assert fates(outcome)["c1"] == "failed"
    assert ", twice" in reason(outcome, "c1")
    again = World(as_predicted(candidates), ends={"c1": end})
    recovered = again.search(
        candidates, on_task=lambda _, task: again.ends.pop("c1", None) if task.attempt else None
    )
    assert recovered.best == "c1"


def test_out_of_memory_rules_out_what_is_predicted_to_need_more() -> None:
    more = [candidate(f"m{n}", "ddp", ("x", {"n": n}), seconds=0.02, peak=(4 + n) * GIB) for n in range(1, 4)]
    less = candidate("less", "fsdp", seconds=0.05, peak=GIB)
    end = TrialOutcome(status="out of memory", rank=1, reason="OutOfMemoryError")
    world = World({"less": 0.05}, ends={"plain": end})
    outcome = world.search([PLAIN, *more, less])
    assert [task.key for task in world.tasks if task.kind == "trial"] == ["plain", "less"]
    assert outcome.best == "less"
    assert fates(outcome)["m1"] == "pruned"
    assert "ran out of memory at 4.00 GiB" in reason(outcome, "m1")


def test_a_trial_that_was_over_the_limit_cannot_win() -> None:
    fast = candidate("fast", "fsdp", seconds=0.01, peak=7 * GIB)
    outcome = World({"plain": 0.03, "fast": 0.01}, peaks={"fast": 9 * GIB}).search([PLAIN, fast])
    assert outcome.best == "plain"
    assert "needs 9.00 GiB, over the limit of 8.00 GiB (measured on rank 0)" in reason(outcome, "fast")


class Processes(World):
    """Trials whose processes take so many bytes beside tensors, and as many more in a long run."""

    def __init__(
        self, truth: dict[str, float], *, beside: dict[str, int], further: int = 0, **more: object
    ) -> None:
        super().__init__(truth, **more)  # type: ignore[arg-type]
        self.beside, self.further = beside, further

    def run(self, task: TrialTask) -> TrialOutcome:
        outcome = super().run(task)
        if not outcome.succeeded or task.key not in self.beside:
            return outcome
        whole = tuple(peak + self.beside[task.key] for peak in outcome.peak_bytes)
        return replace(outcome, process_bytes=whole, further_bytes=(self.further,) * len(whole))


def test_a_limit_is_for_the_process_and_for_a_long_run() -> None:
    fast = candidate("fast", "fsdp", seconds=0.01, peak=7 * GIB)
    truth = {"plain": 0.03, "fast": 0.01}
    beside = dict.fromkeys(truth, GIB // 2)
    fits = Processes(truth, beside=beside, peaks={"fast": 7 * GIB}).search([PLAIN, fast])
    assert fits.best == "fast"
    assert fits.beside == BesideTensors(GIB // 2, GIB // 2, GIB // 2, 2)
    grows = Processes(truth, beside=beside, further=GIB, peaks={"fast": 7 * GIB}).search([PLAIN, fast])
    assert grows.best == "plain"
    assert "needs 8.50 GiB, over the limit of 8.00 GiB (measured on rank 0)" in reason(grows, "fast")


def test_what_processes_take_rules_out_what_tensors_alone_would_not() -> None:
    near = candidate("near", "fsdp", seconds=0.02, peak=7.6 * GIB)
    plain = candidate("plain", "ddp", seconds=0.03, peak=GIB, is_baseline=True)
    world = Processes({"plain": 0.03, "near": 0.02}, beside={"plain": 6 * GIB, "near": 6 * GIB})
    outcome = world.search([plain, near])
    assert outcome.best == "plain"
    assert "beyond their tensors (6.00 GiB to 6.00 GiB)" in reason(outcome, "near")


def test_who_runs_out_while_it_plans_says_nothing_of_others() -> None:
    """What ran out were not its tensors: others as large, and larger ones, are tried."""
    alike = candidate("alike", "fsdp", seconds=0.02, peak=4 * GIB)
    plans = candidate("plans", "operator_parallel", seconds=0.01, peak=4 * GIB)
    end = TrialOutcome(status="out of memory", rank=0, process_bytes=(8 * GIB, 8 * GIB), while_applying=True)
    world = World(
        {"plain": 0.03, "alike": 0.02}, ends={"plans": end}, peaks={"plain": 4 * GIB, "alike": 4 * GIB}
    )
    outcome = world.search([candidate("plain", "ddp", peak=4 * GIB, is_baseline=True), plans, alike])
    assert outcome.best == "alike"
    assert "out of memory on rank 0 while the strategy was being applied, before the first step" in reason(
        outcome, "plans"
    )


def test_a_method_that_runs_out_while_it_is_applied_is_not_tried_to_the_end() -> None:
    """However small its candidates are predicted to be."""
    tensor = [
        candidate(f"t{n}", "tensor_parallel", ("x", {"n": n}), seconds=0.01 + n * 1e-3, peak=GIB)
        for n in range(6)
    ]
    end = TrialOutcome(status="out of memory", rank=0, process_bytes=(8 * GIB, 8 * GIB), while_applying=True)
    other = candidate("other", "fsdp", seconds=0.04, peak=6 * GIB)
    world = World({"other": 0.04}, ends={one.key: end for one in tensor})
    outcome = world.search(
        [replace(PLAIN, pruned=Pruned(kind="memory", reason="too large")), *tensor, other], max_trials=6
    )
    assert outcome.best == "other"
    assert [task.key for task in world.tasks][2] == "other"


def test_if_every_trial_fails_the_reasons_and_the_cause_are_told() -> None:
    candidates = ladder(50)
    end = TrialOutcome(status="raised", reason="KeyError: 'labels' in forward", log="/tmp/x.log")
    world = World({}, ends={one.key: end for one in candidates})
    outcome = world.search(candidates)
    assert outcome.best is None
    assert outcome.num_trials == 3
    assert outcome.stop_reason == "every trial raised the same error: KeyError: 'labels' in forward"
    assert "KeyError: 'labels' in forward" in outcome.nearest_miss
    assert outcome.winner is None


def test_if_nothing_fits_the_nearest_miss_is_told() -> None:
    over = Pruned(kind="memory", reason="needs 11.1 GiB", hint="checkpoint would reduce it to 5.00 GiB")
    candidates = [
        replace(candidate("plain", "ddp", peak=20 * GIB, is_baseline=True), pruned=replace(over, hint="")),
        replace(candidate("near", "fsdp", peak=11.1 * GIB), pruned=over),
    ]
    outcome = World({}).search(candidates)
    assert outcome.num_trials == 0
    assert outcome.nearest_miss.startswith(
        "Nearest: fsdp needs 3.10 GiB more on every rank than the limit of 8.00 GiB"
    )
    assert "checkpoint would reduce it to 5.00 GiB" in outcome.nearest_miss


def test_the_nearest_miss_names_the_rank_and_what_was_not_tried() -> None:
    end = TrialOutcome(
        status="out of memory", rank=1, peak_bytes=(8 * GIB, 11 * GIB), reason="OutOfMemoryError"
    )
    small = candidate("small", "ddp", "checkpoint", peak=2 * GIB)
    outcome = World({}, ends={"plain": end}).search([PLAIN, small], max_trials=1)
    assert "needs 3.00 GiB more on rank 1" in outcome.nearest_miss
    assert "try checkpoint" in outcome.nearest_miss


def test_short_of_memory_the_smallest_is_tried_soon() -> None:
    sizes = [
        candidate(f"p{n}", ("fsdp", {"n": n}), seconds=0.02 + n * 1e-4, peak=(7.9 - n / 8) * GIB)
        for n in range(50)
    ]
    end = TrialOutcome(status="out of memory", rank=0)
    ends = {one.key: end for one in [PLAIN, *sizes[:-1]]}
    world = World({sizes[-1].key: 0.03}, ends=ends)
    outcome = world.search([PLAIN, *sizes])
    assert outcome.best == sizes[-1].key
    assert sizes[-1].key in [task.key for task in world.tasks[:3]]


def test_a_method_that_always_fails_is_not_tried_again_and_again() -> None:
    bad = [candidate(f"b{n}", "compile", ("x", {"n": n}), seconds=0.015 + n * 1e-4) for n in range(20)]
    good = [candidate(f"g{n}", "fsdp", ("x", {"n": n}), seconds=0.022 + n * 1e-4) for n in range(20)]
    end = TrialOutcome(status="raised", reason="no compiler")
    world = World(as_predicted([PLAIN, *good]), ends={one.key: end for one in bad}, jitter=0.01)
    outcome = world.search([PLAIN, *bad, *good])
    assert outcome.best in {one.key for one in good[:4]}
    assert sum(task.key.startswith("b") for task in world.tasks) <= 4


# ---- checks and known strategies


def test_the_winner_is_probed_and_replaced_if_its_numbers_are_wrong() -> None:
    candidates = ladder(2, step=0.005)
    world = World(as_predicted(candidates), jitter=0.001)
    search = Search(setting(), SearchSettings(), candidates, clock=world.clock)
    while (task := search.ask()) is not None:
        outcome = world.run(task)
        if task.kind == "probe" and task.key == "c1":
            outcome = TrialOutcome(status="wrong", reason="embedding.weight is off by 0.3 of its update")
        search.tell(task.id, outcome)
    found = search.outcome()
    assert found.best == "c0"
    assert fates(found)["c1"] == "failed"
    assert "embedding.weight" in reason(found, "c1")
    assert found.checks == ("numerics against one process, with SGD: passed",)
    assert found.numerics_passed
    assert [task.key for task in world.tasks if task.kind == "probe"] == ["c1", "c0"]


def test_a_probe_that_cannot_run_is_told_and_proves_nothing() -> None:
    world = World(as_predicted([PLAIN]))
    search = Search(setting(), SearchSettings(), [PLAIN], clock=world.clock)
    while (task := search.ask()) is not None:
        failed = TrialOutcome(status="hung", reason="60 s")
        search.tell(task.id, failed if task.kind == "probe" else world.run(task))
    assert search.outcome().best == "plain"
    assert search.outcome().checks == (
        "numerics against one process, with SGD: could not be run: not done in time: 60 s",
    )
    assert not search.outcome().numerics_passed


def test_no_probe_if_it_is_switched_off() -> None:
    world = World(as_predicted([PLAIN]))
    assert world.search([PLAIN], probe=False).checks == ()
    assert [task.kind for task in world.tasks] == ["trial"]


def test_a_known_strategy_is_checked_by_one_trial() -> None:
    candidates = ladder(20)
    world = World(as_predicted(candidates), jitter=0.01)
    known = Known("c7", 0.0221)
    search = Search(setting(), SearchSettings(), candidates, clock=world.clock, known=known)
    outcome = world.search(candidates, search=search)
    assert outcome.best == "c7"
    assert outcome.num_trials == 1
    assert "one trial confirms it" in outcome.stop_reason


def test_a_known_strategy_that_has_become_slow_is_searched_anew() -> None:
    candidates = ladder(20)
    world = World({**as_predicted(candidates), "c7": 0.04}, jitter=0.01)
    search = Search(setting(), SearchSettings(), candidates, clock=world.clock, known=Known("c7", 0.0221))
    outcome = world.search(candidates, search=search)
    assert outcome.num_trials > 1
    assert outcome.best in ("c19", "c18")


# ---- what is reported


def test_every_candidate_has_a_fate_and_a_reason_with_numbers() -> None:
    pruned = replace(
        candidate("big", "ddp", ("x", {"n": 9}), peak=9.2 * GIB),
        pruned=Pruned(kind="memory", reason="needs 9.2 GiB of 8.0 GiB (predicted; activations 6.1 GiB)"),
    )
    candidates = [*ladder(12, step=0.002), candidate("slow", "zero", seconds=0.3), pruned]
    outcome = World(as_predicted(candidates), jitter=0.02).search(candidates)
    assert outcome.rows[0].fate == "won"
    assert all(row.reason for row in outcome.rows)
    assert reason(outcome, "big") == "needs 9.2 GiB of 8.0 GiB (predicted; activations 6.1 GiB)"
    assert "× as long (measured " in reason(outcome, "plain")
    assert "× as long (" in reason(outcome, "slow")
    assert "; the baseline takes 5." in outcome.rows[0].reason


def test_noise_lower_bound_and_gap_are_stated() -> None:
    candidates = ladder(25)
    outcome = World(as_predicted(candidates), jitter=0.03).search(candidates)
    best = outcome.winner
    assert best is not None
    assert best.trial is not None
    assert 0.005 < outcome.noise < 0.05
    assert outcome.lower_bound_seconds is not None
    assert outcome.lower_bound_seconds <= best.trial.median_seconds
    assert outcome.gap is not None
    assert 0 <= outcome.gap < 0.2


def test_the_front_of_time_and_memory_is_kept() -> None:
    small = candidate("small", "fsdp", seconds=0.05, peak=GIB)
    bad = candidate("bad", "zero", seconds=0.06, peak=5 * GIB)
    outcome = World(
        {"plain": 0.03, "small": 0.05, "bad": 0.06}, peaks={"plain": 4 * GIB, "small": GIB, "bad": 5 * GIB}
    ).search([PLAIN, small, bad], sampler="exhaustive")
    assert outcome.pareto == ("plain", "small")


def test_an_outcome_travels_as_json() -> None:
    candidates = ladder(8)
    outcome = World(as_predicted(candidates), jitter=0.02).search(candidates)
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


def test_without_estimates_everything_still_works() -> None:
    candidates = [replace(one, estimate=None) for one in ladder(7, step=0.002)]
    truth = as_predicted(ladder(7, step=0.002))
    outcome = World(truth, jitter=0.01).search(candidates)
    assert outcome.best is not None
    assert truth[outcome.best] <= 0.020


def test_an_empty_space_is_over_at_once() -> None:
    outcome = World({}).search([])
    assert outcome.best is None
    assert outcome.rows == ()


def begun(candidates: list[Candidate], **settings: object) -> Search:
    return Search(setting(), SearchSettings(**settings), candidates, clock=World({}).clock)  # type: ignore[arg-type]


def test_ended_before_any_measurement_the_baseline_is_chosen_by_prediction() -> None:
    search = begun(ladder(3))
    search.ask()
    search.cancel("interrupted")
    outcome = search.outcome()
    assert outcome.best == "plain"
    assert outcome.winner is not None
    assert outcome.winner.trial is None
    assert outcome.nearest_miss == ""
    assert "ended before anything was measured (interrupted)" in outcome.winner.reason
    over = Pruned(kind="memory", reason="too large")
    search = begun([replace(PLAIN, pruned=over), *ladder(3)[1:]])
    search.cancel("interrupted")
    assert search.outcome().best == "c2"


def test_ended_after_trials_that_failed_nothing_is_chosen() -> None:
    search = begun(ladder(3))
    task = search.ask()
    assert task is not None
    search.tell(task.id, TrialOutcome(status="raised", reason="KeyError"))
    search.cancel("interrupted")
    assert search.outcome().best is None


def test_the_batch_is_corrected_by_the_bytes_that_the_estimate_was_off() -> None:
    """A constant 40 KiB on a tiny trial is nothing beside the limit; a GiB too much is not."""
    batch: dict[str, Any] = {"largest_batch": 1024, "largest_batch_bytes": 7.9 * GIB, "given_batch": 16}
    pair = [
        replace(candidate("plain", "ddp", peak=2**17, is_baseline=True), **batch),
        replace(candidate("wide", "fsdp", peak=2**17), **{**batch, "largest_batch": 2048}),
    ]
    peaks = {"plain": 2**17, "wide": 2**17 + 40 * 2**10}
    outcome = World({"plain": 0.03, "wide": 0.03}, peaks=peaks).search(pair, objective="batch")
    assert outcome.best == "wide"
    assert reason(outcome, "wide").startswith("a batch of 2048 samples, predicted from a trial of 16 samples")
    assert "measured" not in reason(outcome, "wide")
    peaks["wide"] = 5 * GIB
    assert World({"plain": 0.03, "wide": 0.03}, peaks=peaks).search(pair, objective="batch").best == "plain"


def test_out_of_memory_far_below_the_limit_says_nothing_of_others() -> None:
    end = TrialOutcome(status="out of memory", rank=0, reason="OutOfMemoryError: my own")
    candidates = [candidate("plain", "ddp", peak=GIB, is_baseline=True), candidate("c", "fsdp", peak=2 * GIB)]
    outcome = World({"c": 0.03}, ends={"plain": end}).search(candidates)
    assert outcome.best == "c"
    assert "does not explain (predicted 1.00 GiB of 8.00 GiB): OutOfMemoryError: my own" in reason(
        outcome, "plain"
    )
    none = World({}, ends={"plain": end, "c": end}).search(candidates)
    assert "my own" in none.nearest_miss


def test_an_error_that_others_may_escape_does_not_end_the_search() -> None:
    bad = [candidate(f"b{n}", "fsdp", ("x", {"n": n}), seconds=0.01) for n in range(3)]
    end = TrialOutcome(status="raised", reason="fsdp cannot do this")
    good = candidate("good", "zero", seconds=0.5)
    outcome = World({"good": 0.02}, ends={one.key: end for one in bad}).search([*bad, good])
    assert outcome.best == "good"


def test_attempts_count_as_trials_and_stay_visible() -> None:
    end = TrialOutcome(status="died", reason="killed by signal 9")
    bounded = World({}, ends={"plain": end}).search(ladder(2), max_trials=1)
    assert bounded.num_trials == 1
    assert fates(bounded)["plain"] == "failed"
    assert reason(bounded, "plain") == "died: killed by signal 9; not tried again: max_trials=1 was reached"
    world = World({"plain": 0.03}, ends={"plain": end})
    outcome = world.search([PLAIN], on_task=lambda _, task: world.ends.clear() if task.attempt else None)
    assert outcome.num_trials == 2
    assert reason(outcome, "plain").endswith("; after 1 failed attempt: died: killed by signal 9")


def test_nothing_tried_is_not_everything_tried() -> None:
    over = Pruned(kind="memory", reason="needs too much")
    outcome = World({}).search([replace(one, pruned=over) for one in ladder(2)])
    assert outcome.stop_reason == "no candidate fits in memory"


def test_the_stated_noise_is_that_of_the_steps() -> None:
    outcome = World({"plain": 0.03}, jitter=0.05).search([PLAIN])
    trial = outcome.rows[0].trial
    assert trial is not None
    assert outcome.noise == pytest.approx(trial.noise_seconds / trial.median_seconds)
    assert f"± {seconds_text(trial.noise_seconds)}" in outcome.rows[0].reason


# ---- one process, and plain strategies


ALONE = replace(PLAIN, is_plain=True, fits_alone=True)
AMP = ("amp", {"dtype": "bf16"})


def _in_amp(key: str, *methods: Any, **more: Any) -> Candidate:
    return replace(candidate(key, *methods, AMP, **more), precision="amp(bf16)")


@pytest.mark.parametrize(("seconds", "is_as_fast"), [(0.015, True), (0.020, True), (0.030, False)])
def test_one_process_is_compared_with_the_winner(seconds: float, is_as_fast: bool) -> None:
    world = World({"plain": 0.030, "other": 0.020, "single": seconds})
    outcome = world.search([ALONE, candidate("other", "fsdp", seconds=0.020)])
    assert outcome.best == "other"
    assert [task.kind for task in world.tasks[-2:]] == ["probe", "single"]
    last = world.tasks[-1]
    assert (last.key, last.steps) == ("other", PLAIN.steps)  # what is left of the plain strategy is run
    assert last.rule.best_seconds == pytest.approx(0.020)
    assert outcome.single_process is not None
    assert outcome.single_process.is_as_fast is is_as_fast
    assert outcome.single_process.trial.median_seconds == pytest.approx(seconds)
    assert outcome.num_trials == sum(task.kind == "trial" for task in world.tasks)
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


@pytest.mark.parametrize(("median", "is_as_fast"), [(0.0215, True), (0.0225, False)])
def test_however_noisy_one_process_must_be_close(median: float, is_as_fast: bool) -> None:
    steps = (0.5 * median, 0.7 * median, median, 1.3 * median, 1.5 * median)
    ends = {"single": TrialOutcome(status="ok", step_seconds=steps)}
    outcome = World({"plain": 0.020}, ends=ends).search([ALONE])
    assert outcome.single_process is not None
    assert outcome.single_process.is_as_fast is is_as_fast


def test_one_process_that_cannot_be_measured_is_not_said_to_be_as_fast() -> None:
    end = TrialOutcome(status="out of memory", reason="a step holds 9 GiB")
    outcome = World({"plain": 0.030}, ends={"single": end}).search([ALONE])
    assert outcome.single_process is not None
    assert not outcome.single_process.is_as_fast
    assert outcome.best == "plain"


def test_one_process_that_does_not_fit_is_not_tried() -> None:
    assert World({"plain": 0.030}).search([replace(PLAIN, is_plain=True)]).single_process is None


def test_where_time_does_not_count_one_process_is_not_tried() -> None:
    assert World({"plain": 0.030}).search([ALONE], objective="memory").single_process is None


def test_the_time_limit_leaves_room_for_the_trial_in_one_process() -> None:
    """Each task takes a second; without room for the last, another candidate would have been tried."""
    others = [candidate(f"c{index}", ("fsdp", {"level": index}), seconds=0.001) for index in range(9)]
    truth = {"plain": 0.001, "single": 0.001, **{one.key: 0.001 for one in others}}
    world = World(truth)
    outcome = world.search([ALONE, *others], time_limit_s=6.5)
    assert [task.kind for task in world.tasks].count("single") == 1
    assert world.tasks[-1].deadline_s == LEAST_DEADLINE_S
    assert outcome.seconds <= 6.5


def test_one_process_is_run_in_the_winner_s_precision() -> None:
    plain = replace(_in_amp("amp", "ddp", seconds=0.020), is_plain=True, fits_alone=True)
    world = World({"plain": 0.030, "amp": 0.020, "single": 0.020})
    world.search([ALONE, plain])
    assert world.tasks[-1].kind == "single"
    assert world.tasks[-1].steps == plain.steps


def test_a_plain_strategy_of_the_winner_s_precision_is_tried_to_know_the_gain() -> None:
    """It is predicted to be far slower, so that nothing else would have it tried."""
    slow = replace(_in_amp("amp", "ddp", seconds=3.0), is_plain=True)
    given = [replace(PLAIN, is_plain=True), _in_amp("fast", "checkpoint", "ddp", seconds=0.010), slow]
    truth = {"plain": 0.030, "fast": 0.010, "amp": 0.025}
    outcome = World(truth).search(given)
    assert outcome.best == "fast"
    assert fates(outcome)["amp"] == "lost"
    assert outcome.num_trials == 3
    unknown = World(truth).search(given, max_trials=2)
    assert fates(unknown)["amp"] == "untried"
