"""A user's file with a model and a batch, in the folder that a verb is run in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from atorch_ns.cli import main
from tests.cli.inline import run_inline

JOB = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))

    def forward(self, features):
        return self.layers(features)


def build():
    return Model()


def sample():
    return torch.zeros(4, 32)


def loss(batch, output):
    return (output - batch).square().mean()


def fails():
    raise ValueError("no such corpus")


number = 3
"""


class Done(NamedTuple):
    """How the command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with ``job.py``; the working directory for the test."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("job", None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the whole command, its handling of errors included, in the test's folder."""

    def start(*arguments: str) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["atorch-ns", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return Done(int(ended.value.code or 0), written.out, written.err)

    return start


@pytest.fixture
def inline_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs that train do so in the test's process, as one rank."""
    monkeypatch.setattr("atorch_ns.processes.run_local_ranks", run_inline)
