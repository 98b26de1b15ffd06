"""Calls that are sent to ranks: the task, and each way in which it can end."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from atorch_ns.errors import InputError
from atorch_ns.processes.calls import CallOutcome, main, read_outcome, send_call


@pytest.fixture(autouse=True)
def _rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "path", list(sys.path))


def _run(folder: Path, function: Any, *arguments: Any, rank: int = 0) -> tuple[int, CallOutcome]:
    send_call(folder, function, arguments)
    code, outcome = main(folder), read_outcome(folder, rank)
    assert outcome is not None
    return code, outcome


def test_a_closure_and_its_value_are_sent(tmp_path: Path) -> None:
    factor = 3
    code, outcome = _run(tmp_path, lambda number: {"product": factor * number}, 5)
    assert (code, outcome.problem, outcome.value()) == (0, "", {"product": 15})


def test_only_rank_0_sends_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    code, outcome = _run(tmp_path, threading.Lock, rank=1)
    assert (code, outcome.data, outcome.problem) == (0, b"", "")
    assert read_outcome(tmp_path, 0) is None, "a rank that has not ended has no outcome"


def test_an_error_comes_back_with_its_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("corpus")

    code, outcome = _run(tmp_path, fail)
    assert (code, outcome.problem) == (1, "KeyError: 'corpus'")
    assert "in fail" in outcome.trace


def test_leaving_is_a_failure_too(tmp_path: Path) -> None:
    code, outcome = _run(tmp_path, sys.exit, 0)
    assert (code, outcome.problem) == (1, "SystemExit: 0")


def test_a_value_that_cannot_be_sent_is_named_with_advice(tmp_path: Path) -> None:
    code, outcome = _run(tmp_path, threading.Lock)
    assert code == 1
    assert "returned a _thread.lock on rank 0" in outcome.problem
    assert "Return plain values and CPU tensors" in outcome.problem


def test_a_function_that_cannot_be_sent_is_named_before_ranks_start(tmp_path: Path) -> None:
    lock = threading.Lock()

    def train() -> object:
        return lock

    with pytest.raises(InputError, match=r"train cannot be sent to the workers.*inside the function"):
        send_call(tmp_path, train, ())
    assert not list(tmp_path.iterdir())
