"""What `make test` runs: every cheap test, dear ones in turn, and no more than the budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import sample
from tests.sample import BUDGETS, MOST, START, draw_tests, function_of, read_costs, room_for_dear, room_of

FOLDERS = {path.name for path in Path(__file__).parent.iterdir() if any(path.glob("**/test_*.py"))}


def test_the_budgets_add_up() -> None:
    assert sum(BUDGETS.values()) <= MOST - START
    assert not FOLDERS - BUDGETS.keys()
    costs = read_costs()
    over = {
        room: costs["cheap"].get(room, 0) for room in BUDGETS if costs["cheap"].get(room, 0) > BUDGETS[room]
    }
    assert not over, f"cheap tests of these rooms take more than their budget: {over}"


def test_few_tests_are_for_test_all_alone() -> None:
    """What fits into no budget is never drawn: mark it slow, or make it cheaper."""
    costs = read_costs()
    never = {
        test: seconds
        for test, seconds in costs["dear"].items()
        if seconds > room_for_dear(room_of(test), costs, BUDGETS)
    }
    assert len(never) <= 30, never


COSTS = {
    "cheap": {"data": 2.0},
    "dear": {f"tests/data/test_x.py::test_{name}[{n}]": 3.0 for name in "abc" for n in (1, 2)},
}
CHEAP = "tests/data/test_x.py::test_new"


def test_cheap_and_new_tests_are_always_run() -> None:
    drawn = draw_tests([*COSTS["dear"], CHEAP], "seed", COSTS, {"data": 2})
    assert drawn == {CHEAP}


def test_every_function_comes_before_a_second_case_of_any() -> None:
    drawn = draw_tests(COSTS["dear"], "seed", COSTS, {"data": 11})
    assert len(drawn) == 3
    assert len({function_of(test) for test in drawn}) == 3
    assert draw_tests(COSTS["dear"], "seed", COSTS, {"data": 20}) == set(COSTS["dear"])


def test_what_is_drawn_moves_with_the_seed_and_with_nothing_else() -> None:
    seeds = [frozenset(draw_tests(COSTS["dear"], str(n), COSTS, {"data": 5})) for n in range(60)]
    assert len(set(seeds)) == 6, "each has its turn"
    assert draw_tests(sorted(COSTS["dear"], reverse=True), "7", COSTS, {"data": 5}) == seeds[7]


def test_costs_are_taken_over_from_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "costs.json"
    here = "tests/test_sample.py::test_the_budgets_add_up"
    file.write_text(json.dumps({"cheap": {"data": 2.0}, "dear": {here: 4.0, "tests/gone.py::test_x": 9.0}}))
    (tmp_path / "1.jsonl").write_text(
        '["tests/data/test_x.py::test_a", 7.04]\n["tests/job/test_y.py::test_b", 0.2]\n'
    )
    monkeypatch.setattr(sample, "COSTS", file)
    monkeypatch.setattr(sample, "RECORDS", tmp_path)
    sample.write_costs()
    assert read_costs() == {
        "cheap": {"data": 2.0, "job": 0.2},
        "dear": {here: 4.0, "tests/data/test_x.py::test_a": 7.0},
    }
