"""``atorch-ns report`` and ``atorch-ns diff``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atorch_ns import Strategy
from atorch_ns.cli import app
from atorch_ns.report import TrainingReport
from tests.cli.conftest import Run
from tests.report.outcomes import searched


@pytest.fixture
def report(tmp_path: Path) -> str:
    path = tmp_path / "report.json"
    TrainingReport(search=searched()).save(path)
    return str(path)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_report_as_text_page_and_json(report: str, tmp_path: Path) -> None:
    assert "Chosen: fsdp" in _run("report", report).stdout
    page, text = tmp_path / "report.html", tmp_path / "report.txt"
    done = _run("report", report, "--html", str(page), "--text", str(text))
    assert done.stdout == ""
    assert page.read_text() == TrainingReport(search=searched()).to_html()
    assert "Chosen: fsdp" in text.read_text()
    assert TrainingReport.from_json(_run("report", report, "--json").stdout).search == searched()


def test_what_is_no_report(run: Run, tmp_path: Path) -> None:
    Strategy(["fsdp"]).save(tmp_path / "strategy.json")
    done = run("report", "strategy.json")
    assert done.returncode == 2
    assert "not a report" in done.stderr


def test_diff_of_strategies_and_reports(report: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    Strategy(["fsdp", ("amp_native", "fp16")]).save(other)
    differs = _run("diff", report, str(other))
    assert differs.exit_code == 1
    assert "amp_native" in differs.stdout
    same = _run("diff", str(other), str(other))
    assert (same.exit_code, same.stdout.strip()) == (0, "no difference")
    document = json.loads(_run("diff", report, str(other), "--json").stdout)
    assert document["same"] is False
    assert document["estimates"] == []


def test_diff_with_a_model_says_what_it_is_predicted_to_change(job: Path) -> None:
    job_options = ("--model", "job.py:build", "--sample", "job.py:sample", "--cluster", "2xcpu")
    done = _run("diff", "ddp", "fsdp", *job_options)
    assert done.exit_code == 1
    for words in ("- ddp", "+ fsdp", "before (predicted)", "gather", "step"):
        assert words in done.stdout
    assert "before: ddp\nafter:  fsdp\n" in done.stdout
    Strategy([("parallel_mode", {"axes": [["data", 16]]}), "ddp"]).save(job / "sixteen.json")
    fitted = _run("diff", "sixteen.json", "fsdp", *job_options)
    assert "before: parallel_mode: {'axes': [['data', 16]]} became" in fitted.stderr
    document = json.loads(_run("diff", "ddp", "fsdp", "--json", *job_options).stdout)
    assert [each["fits"] for each in document["estimates"]] == [True, True]
