"""The command line of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import imports
from benchmarks.__main__ import NAMES, main

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
