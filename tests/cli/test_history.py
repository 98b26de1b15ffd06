"""``atorch-ns history``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atorch_ns.cli import app
from atorch_ns.cli.history import _trial_table
from atorch_ns.search import History, read_history
from tests.cli.conftest import Run
from tests.search.fakes import World
from tests.search.history.test_history import CANDIDATES, TRUTH, begin, some_trials


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "history.journal"
    world = World(TRUTH, jitter=0.01)
    history = History(path)
    history.conclude(world.search(CANDIDATES, search=begin(world, history)))
    return path


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["history", *arguments], catch_exceptions=False)


def test_studies_with_their_trials_and_the_best(journal: Path) -> None:
    done = _run(str(journal))
    assert done.exit_code == 0
    (study,) = read_history(journal)
    assert study.name in done.stdout
    assert "best: fsdp(level=7)" in done.stdout
    assert "ms per step (measured)" in done.stdout
    assert len([line for line in done.stdout.splitlines() if " ok " in line]) == len(
        [trial for trial in study.trials if trial.outcome.status == "ok"]
    )


def test_json(journal: Path) -> None:
    (study,) = json.loads(_run(str(journal), "--json").stdout)["studies"]
    assert study["best"]["label"] == "fsdp(level=7)"
    assert study["num_searches"] == 1
    first = study["trials"][0]
    assert first["label"] == "ddp"
    assert first["state"] == "ok"
    assert first["seconds"] == pytest.approx(0.030, rel=0.2)
    assert set(first["parameters"].values()) <= {"on", "off"}
    assert study["fastest_trial"] is not None


def test_a_search_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    world = World(TRUTH)
    some_trials(world, begin(world, History(path)), 2)
    text = _run(str(path)).stdout
    assert "no search has finished" in text
    assert "0 searches ended, 2 trials" in text


def test_reading_changes_nothing_even_where_the_last_entry_is_incomplete(journal: Path) -> None:
    with journal.open("ab") as file:
        file.write(b'{"study": "f1", "tri')
    before = journal.read_bytes()
    others = sorted(journal.parent.iterdir())
    assert _run(str(journal)).exit_code == 0
    assert journal.read_bytes() == before
    assert sorted(journal.parent.iterdir()) == others


def test_one_study(journal: Path, run: Run) -> None:
    assert run("history", str(journal), "--study", "f1").returncode == 0
    other = run("history", str(journal), "--study", "zz")
    assert other.returncode == 2
    assert "Studies: f1" in other.stderr


def test_a_small_peak_has_a_unit_of_its_size(journal: Path) -> None:
    first = read_history(journal)[0].trials[0]
    trial = replace(first, outcome=replace(first.outcome, peak_bytes=(30 * 1024,)))
    assert "30.0 KiB" in _trial_table((trial,))[1]
