"""One refusal is enough: what would be refused by the same refusal key is not tried, and nothing else is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atorch_ns.search import Candidate, Search, SearchOutcome, SearchSettings, TrialOutcome
from atorch_ns.search.knowledge import Knowledge
from atorch_ns.search.objective import Objective
from atorch_ns.search.residual_model import DRIFT, read_features
from atorch_ns.search.space.candidate import Pruned
from atorch_ns.search.trial import Ledger
from tests.search.fakes import GIB, World, candidate, setting

PLAIN = candidate("plain", "ddp", seconds=0.030, is_baseline=True)
REFUSED = TrialOutcome(status="refused", reason="InputError: no layer divides", rank=1, refused_by="cut")


def alike(number: int, refusal_key: str = "a") -> list[Candidate]:
    """Candidates that use the method ``cut`` with the same refusal key and differ in what comes later."""
    return [
        replace(
            candidate(
                f"{refusal_key}{index}", "cut", ("later", {"n": index}), seconds=0.010 + 0.0001 * index
            ),
            refusal_keys=(("cut", refusal_key),),
        )
        for index in range(number)
    ]


def searched(candidates: list[Candidate], ends: dict[str, TrialOutcome]) -> tuple[World, SearchOutcome]:
    truth = {one.key: one.estimate.step_seconds for one in candidates if one.estimate}
    world = World(truth, ends=ends)
    return world, world.search(candidates, max_trials=20)


def tried(world: World) -> list[str]:
    return [task.key for task in world.tasks if task.kind == "trial"]


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
            f"cut refuses it, as it refused {rows[failed].candidate.label}: InputError: no layer divides"
        )


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_drift_between_trials_widens_a_measurement_once(objective: str) -> None:
    ledger = Ledger()
    ledger.add("plain", TrialOutcome(status="ok", step_seconds=(0.03,) * 4, peak_bytes=(GIB,)))
    settings = Objective(SearchSettings(objective=objective))
    knowledge = Knowledge([PLAIN], read_features([PLAIN]), ledger, settings, limit_bytes=0)
    assert knowledge.posterior.deviation[0] == pytest.approx(DRIFT, rel=0.01)


def test_a_candidate_that_amounts_to_another_leaves_corrections_on() -> None:
    others = [candidate("other", "zero1", seconds=0.02), candidate("third", "zero2", seconds=0.04)]
    twin = replace(
        candidate("twin", "zero1", "fsdp"),
        estimate=None,
        pruned=Pruned(kind="same", reason="amounts to zero1"),
    )
    truth = {"plain": 0.03, "other": 0.02, "third": 0.04}
    world = World(truth, peaks=dict.fromkeys(truth, int(1.5 * GIB)))
    outcome = world.search([PLAIN, *others, twin], max_trials=2)
    rows = {row.candidate.key: row for row in outcome.rows}
    assert [key for key, row in rows.items() if row.trial is None] == ["third", "twin"]
    assert rows["third"].corrected_bytes is not None
    assert rows["third"].corrected_bytes > 1.2 * GIB  # its trials say so of the others
    assert rows["twin"].corrected_bytes is None


def test_other_refusal_keys_are_tried() -> None:
    candidates = [PLAIN, *alike(3), *alike(2, refusal_key="b")]
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
def test_what_says_nothing_of_the_key_prunes_nothing(end: TrialOutcome) -> None:
    candidates = [PLAIN, *alike(3)]
    _, outcome = searched(candidates, {"a0": end})
    assert outcome.best in ("a1", "a2")
    assert not any(row.fate == "pruned" for row in outcome.rows)


def test_a_key_with_which_another_has_run_is_no_reason() -> None:
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
