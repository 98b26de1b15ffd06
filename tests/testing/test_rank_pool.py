"""Texts about ranks that have ended; the ranks themselves are tested in test_workers."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from atorch_ns.testing.rank_pool import Outcome, Setup, _death_message, _without_harness, rank_environment
from atorch_ns.testing.workers import WorkerFailure


def _setup(folder: Path, *, master_port: int | None) -> Setup:
    return Setup(num_ranks=2, folder=folder, timeout_s=1.0, env={"LOCAL_RANK": "7"}, master_port=master_port)


def test_the_environment_is_a_launcher_s_and_the_caller_s_goes_before(tmp_path: Path) -> None:
    without = rank_environment(_setup(tmp_path, master_port=None), 1)
    assert without == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"}
    assert rank_environment(_setup(tmp_path, master_port=12), 1)["MASTER_PORT"] == "12"


def test_the_files_of_ranks_are_their_own(tmp_path: Path) -> None:
    setup = _setup(tmp_path, master_port=None)
    assert setup.files(1).report == tmp_path / "report_1"
    assert len({*setup.files(0), *setup.files(1)}) == 6


@pytest.mark.parametrize(
    ("exit_code", "text"), [(3, "exit code 3"), (-9, "ended by SIGKILL"), (-63, "ended by")]
)
def test_a_death_is_described_by_its_exit_code(exit_code: int, text: str) -> None:
    assert text in _death_message(exit_code)


def test_stacks_end_at_the_function_that_was_called() -> None:
    stacks = "Thread 1:\n  in wait\n  in train\n  File x in rank_main\n  in fork\nThread 2:\n  in poll"
    assert _without_harness(stacks) == "Thread 1:\n  in wait\n  in train\nThread 2:\n  in poll"


def test_a_failure_counts_the_stopped_apart_and_survives_pickling() -> None:
    outcomes = [
        Outcome[None](rank=0, status="stopped", traceback="in barrier"),
        Outcome[None](rank=1, status="raised", error_type="ValueError", message="bad", output="just before"),
        Outcome[None](rank=2, status="timed_out", traceback="in sleep"),
        Outcome[None](rank=3, status="returned"),
    ]
    failure = WorkerFailure(outcomes)
    assert set(failure.failures) == {1, 2}
    assert "2 of 4 ranks failed: 1, 2. Still running at the time limit: 2." in str(failure)
    assert "rank 1 raised ValueError after 0.0 s\nbad\n... printed by rank 1:\njust before" in str(failure)
    assert "rank 0 was stopped" in str(failure)
    assert "rank 3" not in str(failure)
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)
