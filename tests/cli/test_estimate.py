"""``atorch-ns estimate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atorch_ns import Strategy
from atorch_ns.cli import app
from tests.cli.conftest import Run

_JOB = ("--model", "job.py:build", "--sample", "job.py:sample", "--cluster", "2xcpu", "--batch", "8")


def _estimate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *_JOB, *arguments], catch_exceptions=False)


@pytest.mark.parametrize("form", ["names", "json", "file"])
def test_parts_collectives_and_whether_it_fits(job: Path, form: str) -> None:
    Strategy(["fsdp"]).save(job / "strategy.json")
    given = {"names": "fsdp", "json": '["fsdp"]', "file": "strategy.json"}[form]
    done = _estimate("--strategy", given)
    assert done.exit_code == 0
    for words in ("It fits:", "(predicted, ", "compute", "all_gather", "reduce_scatter"):
        assert words in done.stdout
    assert "parallel_mode is added" in done.stderr


def test_json_has_the_parts_in_bytes_and_seconds(job: Path) -> None:
    figures = json.loads(_estimate("--strategy", "ddp", "--json").stdout)
    memory, times = figures["memory_bytes"], figures["time_seconds"]
    assert memory["peak"] == pytest.approx(sum(memory.values()) - memory["peak"])
    assert times["step"] == pytest.approx(sum(times.values()) - times["step"])
    assert times["compute"] > 0
    assert figures["fits"] is True
    assert {call["kind"] for call in figures["collectives"]} == {"all_reduce"}


def test_what_does_not_fit_is_exit_code_3_and_says_by_how_much(job: Path) -> None:
    done = _estimate("--strategy", "ddp", "--memory-limit", "0.01MiB")
    assert done.exit_code == 3
    assert "It does not fit" in done.stdout
    assert " over. " in done.stdout
    assert "The largest part is" in done.stdout


@pytest.mark.parametrize(
    ("strategy", "code", "words"),
    [
        ("fsdpp", 2, "Did you mean 'fsdp'"),
        ("missing.json", 2, "no such strategy file"),
        ("fsdp,zero1", 2, "cannot be combined"),
    ],
)
def test_a_wrong_strategy_is_a_sentence(job: Path, run: Run, strategy: str, code: int, words: str) -> None:
    done = run("estimate", "--strategy", strategy, *_JOB)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
