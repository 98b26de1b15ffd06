"""One refusal is enough: what would be refused on the same grounds is not tried, and nothing else is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.method import load_registry, resolve
from atorch_ns.search import Candidate, Search, SearchOutcome, SearchSettings, TrialOutcome
from atorch_ns.search._grounds import grounds_of
from atorch_ns.strategy import Strategy
from tests.search.fakes import World, candidate, setting

REGISTRY = load_registry()
PLAIN = candidate("plain", "ddp", seconds=0.030, is_baseline=True)
REFUSED = TrialOutcome(status="refused", reason="InputError: no layer divides", rank=1, refused_by="cut")


def grounds(*methods: Any, ranks: int = 8) -> dict[str, str]:
    """Of a strategy as a search has it."""
    return dict(grounds_of(resolve(Strategy(list(methods)), Cluster.from_spec(f"{ranks}xcpu"), REGISTRY)))


def mesh(**axes: int) -> tuple[str, Any]:
    return ("parallel_mode", {"axes": [list(axis) for axis in axes.items()]})


def alike(number: int, ground: str = "a") -> list[Candidate]:
    """Candidates that use the method ``cut`` on the same grounds and differ in what comes later."""
    return [
        replace(
            candidate(f"{ground}{index}", "cut", ("later", {"n": index}), seconds=0.010 + 0.0001 * index),
            grounds=(("cut", ground),),
        )
        for index in range(number)
    ]


def searched(candidates: list[Candidate], ends: dict[str, TrialOutcome]) -> tuple[World, SearchOutcome]:
    truth = {one.key: one.estimate.step_seconds for one in candidates if one.estimate}
    world = World(truth, ends=ends)
    return world, world.search(candidates, max_trials=20)


def tried(world: World) -> list[str]:
    return [task.key for task in world.tasks if task.kind == "trial"]


# ---- what a refusal rests on


def test_what_comes_later_does_not_count() -> None:
    one = grounds(mesh(tensor=2, data=4), "tensor_parallel")["tensor_parallel"]
    for later in ("half", "amp_native", "checkpoint", ("gradient_accumulation", {"num_micro_batches": 2})):
        assert grounds(mesh(tensor=2, data=4), "tensor_parallel", later)["tensor_parallel"] == one
    assert grounds(mesh(tensor=2, zero=4), "tensor_parallel", "fsdp")["tensor_parallel"] == one


@pytest.mark.parametrize(
    "other",
    [
        (mesh(tensor=4, data=2), "tensor_parallel"),
        (mesh(tensor=2, data=4), ("tensor_parallel", {"sequence": True})),
        (mesh(tensor=2, sequence=2, data=2), "tensor_parallel", "sequence_parallel"),
        (mesh(tensor=2, pipeline=2, data=2), "tensor_parallel", "pipeline_parallel"),
        (mesh(tensor=2, data=4), "tensor_parallel", "module_replace"),
        (mesh(tensor=2, data=4), "tensor_parallel", "compile"),
    ],
    ids=["size", "config", "another axis", "stages", "other modules", "a field that it names"],
)
def test_what_the_method_sees_counts(other: tuple[Any, ...]) -> None:
    one = grounds(mesh(tensor=2, data=4), "tensor_parallel")["tensor_parallel"]
    assert grounds(*other)["tensor_parallel"] != one


def test_methods_that_do_not_say_have_no_grounds() -> None:
    found = grounds(mesh(pipeline=2, data=4), "pipeline_parallel", "half", "checkpoint")
    assert found == {}


# ---- what a search makes of it


def test_one_refusal_prunes_what_would_be_refused_as_well() -> None:
    candidates = [PLAIN, *alike(5)]
    world, outcome = searched(candidates, {one.key: REFUSED for one in candidates[1:]})
    assert len(tried(world)) == 2
    assert outcome.best == "plain"
    rows = {row.candidate.key: row for row in outcome.rows}
    (failed,) = [key for key, row in rows.items() if row.fate == "failed"]
    pruned = [row for row in rows.values() if row.fate == "pruned"]
    assert len(pruned) == 4
    for row in pruned:
        assert row.reason == (
            f"cut refuses it as {rows[failed].candidate.label}: InputError: no layer divides"
        )


def test_other_grounds_are_tried() -> None:
    candidates = [PLAIN, *alike(3), *alike(2, ground="b")]
    world, outcome = searched(candidates, {f"a{index}": REFUSED for index in range(3)})
    assert len([key for key in tried(world) if key.startswith("a")]) == 1
    assert str(outcome.best).startswith("b")


@pytest.mark.parametrize(
    "end",
    [
        replace(REFUSED, refused_by=None),
        replace(REFUSED, refused_by="later"),
        replace(REFUSED, status="raised"),
        replace(REFUSED, status="hung"),
    ],
    ids=["nobody's", "another method's", "an error", "a hang"],
)
def test_what_says_nothing_of_the_grounds_prunes_nothing(end: TrialOutcome) -> None:
    candidates = [PLAIN, *alike(3)]
    _, outcome = searched(candidates, {"a0": end})
    assert outcome.best in ("a1", "a2")
    assert not any(row.fate == "pruned" for row in outcome.rows)


def test_grounds_on_which_another_has_run_are_no_reason() -> None:
    candidates = [PLAIN, *alike(3)]
    search = Search(setting(), SearchSettings(max_trials=20), candidates)
    search.resume("a1", TrialOutcome(status="ok", step_seconds=(0.01,) * 8, peak_bytes=(1, 1)))
    search.resume("a0", REFUSED)
    assert not any(row.fate == "pruned" for row in search.outcome().rows)


def test_a_resumed_refusal_counts() -> None:
    candidates = [PLAIN, *alike(3)]
    search = Search(setting(), SearchSettings(max_trials=20), candidates)
    search.resume("a0", REFUSED)
    assert sum(row.fate == "pruned" for row in search.outcome().rows) == 2
