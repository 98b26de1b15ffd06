"""``atorch-ns search``, on ranks of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from atorch_ns import Strategy
from atorch_ns.report import TrainingReport
from tests.cli.conftest import Run

_JOB = ("--model", "job.py:build", "--sample", "job.py:sample", "--loss", "job.py:loss")
_CODE = "from atorch_ns.cli import main; main()"


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CODE, "search", *_JOB, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(150)
def test_a_search_writes_what_was_asked_for_and_its_history_can_be_read(job: Path, run: Run) -> None:
    files = ("--save", "s.json", "--report", "r.json", "--history", "h.journal")
    process = _start(
        "--nproc", "2", "--max-trials", "2", "--time-limit", "60", "--exclude", "compile", *files
    )
    out, err = _finish(process)
    assert process.returncode == 0, err
    assert (out + err).count("Chosen: ") == 1
    assert (out + err).count("in total; ") == 1  # the verdict's last sentence
    assert len(out.splitlines()) == 1, "standard output is the strategy's own"
    assert "trial 1" in err
    strategy = Strategy.load(job / "s.json")
    assert strategy.requires.world_size == 2
    report = TrainingReport.load(job / "r.json")
    assert report.search is not None
    assert report.search.setting.world_size == 2
    logs = [row.trial.log for row in report.search.rows if row.trial is not None and row.trial.log]
    assert all(Path(log).parent == job / "r.logs" and Path(log).is_file() for log in logs)
    assert (job / "r.logs").exists() == bool(logs)
    assert report.search.setting.global_batch == 8  # the sample's four on every rank
    (study,) = json.loads(run("history", "h.journal", "--json").stdout)["studies"]
    assert study["model"] == "Model"
    assert len(study["trials"]) == report.search.num_trials


@pytest.mark.timeout(150)
def test_ctrl_c_keeps_the_best_so_far(job: Path) -> None:
    slow = "    time.sleep(0.2)  # a trial outlasts the way of a signal\n    return (output"
    text = (job / "job.py").read_text().replace("    return (output", slow)
    (job / "job.py").write_text(f"import time\n{text}")
    process = _start("--nproc", "1", "--time-limit", "90", "--save", "s.json", "--exclude", "compile")
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "trial 2:" in line:
            break
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = _finish(process)
    assert process.returncode == 0, "".join(seen) + err
    assert time.monotonic() - began < 60
    assert "Ctrl-C" in out + err
    assert (job / "s.json").exists()


def test_ctrl_c_before_anything_was_measured_saves_nothing(
    job: Path, run: Run, inline_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(stop_reason="Ctrl-C on rank 0", winner=SimpleNamespace(trial=None))
    result = SimpleNamespace(report=SimpleNamespace(search=found))
    monkeypatch.setattr("atorch_ns.api.auto_accelerate", lambda *_, **__: (True, result, Strategy(["ddp"])))
    done = run("search", *_JOB, "--nproc", "1", "--save", "s.json")
    assert done.returncode == 130
    assert done.stdout == ""
    assert not (job / "s.json").exists()


def test_nothing_feasible_is_exit_code_3(job: Path, run: Run, inline_ranks: None) -> None:
    done = run("search", *_JOB, "--nproc", "1", "--memory-limit", "0.001MiB", "--time-limit", "20")
    assert done.returncode == 3, done.stderr
    assert "no strategy could be run" in done.stderr
    assert "needs" in done.stderr
    assert done.stdout == ""
