"""Ranks that one command starts and ends."""

from __future__ import annotations

import time

import pytest

from atorch_ns.errors import InputError
from atorch_ns.launch import _ranks as module
from atorch_ns.launch import run_local_ranks

_PROGRAM = "tests.launch.rank_program"


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


def test_a_time_limit_ends_them() -> None:
    ends = run_local_ranks(_PROGRAM, ["hang"], 2, timeout_s=1.0, shown=False)
    assert all(end.ended_by_us and end.code < 0 for end in ends)


def test_ctrl_c_goes_to_rank_0() -> None:
    ends = run_local_ranks(_PROGRAM, ["interrupt"], 2, timeout_s=30, shown=False)
    assert [end.code for end in ends] == [5, 0]


def test_no_ranks() -> None:
    with pytest.raises(InputError, match="at least one process"):
        run_local_ranks(_PROGRAM, [], 0)
