"""The command line of the benchmarks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import imports
from benchmarks.__main__ import NAMES, _arguments, main
from benchmarks.table import RESULTS

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(imports, "_once", lambda name: (0.1, 0.2, "torch" in name))

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        return main()

    return call


def test_an_unknown_benchmark_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--only", "memory,taste")
    assert f"taste; choose from {', '.join(NAMES)}" in capsys.readouterr().err


def test_both_files_are_written(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "imports", "--quick", "--out", str(tmp_path)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imports.json", "imports.md"]
    assert (tmp_path / "imports.md").read_text() in capsys.readouterr().out


def test_a_failure_does_not_stop_the_others(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return int("memory" in command)

    monkeypatch.setattr(subprocess, "call", call)
    assert run("--only", "memory,speed", "--quick", "--out", str(tmp_path)) == 1
    assert [command[4] for command in commands] == ["memory", "speed"]
    assert all("--quick" in command for command in commands)
    said = capsys.readouterr().err
    assert "memory: 0 s, failed with exit code 1" in said
    assert "failed, their old results stand: memory" in said


def test_a_quick_run_overwrites_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick"])
    assert _arguments().out != RESULTS
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert _arguments().out == RESULTS
