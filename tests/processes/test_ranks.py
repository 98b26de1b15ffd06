"""Ranks that one command starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atorch_ns.errors import InputError
from atorch_ns.processes import ranks as module
from atorch_ns.processes import ranks as scratch
from atorch_ns.processes import run_local_ranks, scratch_folder

pytestmark = pytest.mark.usefixtures("cold_python")

_PROGRAM = "tests.processes.rank_program"


def test_ranks_have_the_environment_of_a_launcher() -> None:
    ends = run_local_ranks(_PROGRAM, ["go"], 3, timeout_s=30, shown=False)
    assert [end.code for end in ends] == [0, 0, 0]
    assert [end.output for end in ends] == [f"rank {rank} of 3 in {rank}" for rank in range(3)]


def test_the_others_end_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.3)
    began = time.monotonic()
    ends = run_local_ranks(_PROGRAM, ["fail"], 2, timeout_s=50, shown=False)
    assert time.monotonic() - began < 20
    assert ends[1].code == 7
    assert not ends[1].ended_by_us
    assert ends[0].ended_by_us
    assert ends[0].code < 0


def test_the_others_end_sooner_after_a_signal_which_leaves_no_time_to_tell_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 40.0)
    monkeypatch.setattr(module, "_STOPPING_S", 0.3)
    began = time.monotonic()
    ends = run_local_ranks(_PROGRAM, ["killed"], 2, timeout_s=50, shown=False)
    assert time.monotonic() - began < 20
    assert (ends[1].code, ends[1].ended_by_us, ends[0].ended_by_us) == (-signal.SIGKILL, False, True)


def test_a_time_limit_ends_them() -> None:
    ends = run_local_ranks(_PROGRAM, ["hang"], 2, timeout_s=1.0, shown=False)
    assert all(end.ended_by_us and end.code < 0 for end in ends)


def test_ctrl_c_goes_to_rank_0() -> None:
    began = time.monotonic()
    with pytest.raises(
        SystemExit
    ) as ended:  # rank 0 leaves with 5, and rank 1 with 0: 6 is what the signal would give
        run_local_ranks(_PROGRAM, ["interrupt"], 2, timeout_s=30, shown=False, patient=True)
    assert ended.value.code == 130
    assert time.monotonic() - began < 20


_PARENT = """
import sys

from atorch_ns.processes import run_local_ranks, scratch_folder
run_local_ranks("tests.processes.rank_program", ["hang"], 2, shown=False)
"""


def _ranks_of(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in children.read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(what: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 30
    while not what() and time.monotonic() < limit:
        time.sleep(0.05)
    return what()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", _PARENT]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert _wait_for(lambda: len(_ranks_of(parent.pid)) == 2)
        ranks = _ranks_of(parent.pid)
        outputs = [next(tmp_path.glob(f"*/output_{rank}")) for rank in range(2)]
        assert _wait_for(lambda: all(path.stat().st_size for path in outputs))
        parent.send_signal(number)
        _, err = parent.communicate(timeout=30)
    finally:
        parent.kill()
    assert parent.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert err == ""
    assert _wait_for(lambda: not any(map(_runs, ranks)))
    assert bool(list(tmp_path.iterdir())) is (number == signal.SIGKILL)


def test_the_folder_of_a_process_that_was_killed_goes_with_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_YOUNGEST_S", -1.0)
    abandoned = tmp_path / "atorch_ns_run_abandoned"
    abandoned.mkdir()
    (abandoned / ".owner").touch()
    other = tmp_path / "atorch_ns_run_of_somebody_else"  # without a lock: not ours
    other.mkdir()
    with scratch_folder() as first, scratch_folder() as second:
        assert not abandoned.exists()
        assert first.is_dir()
        assert second.is_dir()
    assert list(tmp_path.iterdir()) == [other]


def test_no_ranks() -> None:
    with pytest.raises(InputError, match="at least one process"):
        run_local_ranks(_PROGRAM, [], 0)
