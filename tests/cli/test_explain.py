"""``atorch-ns explain``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atorch_ns import Strategy
from atorch_ns.cli import app
from atorch_ns.report import TrainingReport
from atorch_ns.strategy import Requires
from tests.cli.conftest import Run
from tests.report.outcomes import searched


@pytest.fixture
def report(tmp_path: Path) -> str:
    path = tmp_path / "report.json"
    TrainingReport(search=searched()).save(path)
    return str(path)


def _explain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)


def test_why_this_one_and_not_the_others(report: str) -> None:
    text = _explain(report).stdout
    assert "Chosen: fsdp" in text
    assert "ddp: lost: 60% slower (measured 40.0 ms against 25.0 ms)" in text
    assert "half bf16 → ddp: failed: raised on rank 1" in text
    assert "zero1: pruned: needs 1.17 GiB" in text


@pytest.mark.parametrize("name", ["base", "#3", "3"])
def test_why_not_a_candidate(report: str, name: str) -> None:
    text = _explain(report, "--why", name).stdout
    assert "lost: 60% slower" in text
    assert "step +50%: compute 16.0 ms → 24.0 ms" in text
    assert "peak +100%: parameters 40.0 MiB → 80.0 MiB" in text


def test_why_not_a_method(report: str) -> None:
    text = _explain(report, "--why", "checkpoint").stdout
    assert "checkpoint is not in the chosen strategy." in text
    assert "The best candidate with it is fsdp" in text
    assert "recompute 0 s → 4.00 ms" in text
    failed = _explain(report, "--why", "half").stdout
    assert "No candidate with it could be used." in failed
    assert "raised on rank 1" in failed


def test_a_method_s_name_means_the_method_even_where_a_label_is_the_same(report: str) -> None:
    text = _explain(report, "--why", "ddp").stdout
    assert text.startswith("ddp is not in the chosen strategy.")
    assert "The best candidate with it is ddp → amp_native {'dtype': 'bf16'}: 30.0 ms" in text


def test_a_device_that_is_not_recorded_is_not_claimed(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    Strategy(["ddp"], requires=Requires(world_size=2)).save(path)
    assert _explain(str(path)).stdout.splitlines()[0].endswith("on 2 processes")


def test_why_a_method(report: str) -> None:
    text = _explain(report, "--why", "amp_native").stdout
    assert "amp_native is in the chosen strategy." in text
    assert "The best candidate with it is the chosen one, fsdp" in text
    assert "The best candidate without it is ddp" in text


def test_json(report: str) -> None:
    document = json.loads(_explain(report, "--why", "fsdp", "--json").stdout)
    assert document["why"] == "fsdp"
    assert document["lines"][0] == "fsdp is in the chosen strategy."


def test_a_strategy_file_is_explained_by_its_methods(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    Strategy(["fsdp", ("amp_native", "bf16")]).save(path)
    text = _explain(str(path)).stdout
    assert "amp_native" in text
    assert "fsdp is left out: there is one process" in text
    assert "could be added" in _explain(str(path), "--why", "checkpoint").stdout
    assert "is in the strategy" in _explain(str(path), "--why", "amp_native").stdout


@pytest.mark.parametrize(
    ("name", "code", "words"), [("fsdpp", 2, "Did you mean 'fsdp'"), ("#9", 2, "#1 to #6")]
)
def test_an_unknown_name_is_a_sentence(report: str, run: Run, name: str, code: int, words: str) -> None:
    done = run("explain", report, "--why", name)
    assert done.returncode == code
    assert words in done.stderr


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [("{", 2, "truncated or damaged"), ('{"kind": "atorch_ns report", "schema": 2}', 2, "schema 2")],
)
def test_a_bad_file_is_a_sentence(run: Run, tmp_path: Path, content: str, code: int, words: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    done = run("explain", "bad.json")
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
