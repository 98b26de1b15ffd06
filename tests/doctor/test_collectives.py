"""Checks of ranks on one machine."""

from __future__ import annotations

import pytest

from atorch_ns.doctor import Finding, Place, collectives
from atorch_ns.launch import RankEnd

HERE = Place(num_ranks=2)


def _collect(monkeypatch: pytest.MonkeyPatch, ends: list[RankEnd]) -> list[Finding]:
    monkeypatch.setattr(collectives, "run_local_ranks", lambda *_, **__: ends)
    return collectives.check_collectives(Place(num_ranks=2, timeout_s=7))


def test_ranks_that_fail_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = RankEnd(rank=0, code=-9, output="", ended_by_us=True)
    broken = RankEnd(rank=1, code=1, output="one\nRuntimeError: connection refused", ended_by_us=False)
    (found,) = _collect(monkeypatch, [fine, broken])
    assert found.verdict == "fail"
    assert "rank 1 failed: RuntimeError: connection refused" in found.text
    (found,) = _collect(monkeypatch, [fine])
    assert "rank(s) 0 gave no answer within 7 s" in found.text


def test_nccl_without_a_gpu_for_every_rank_is_said() -> None:
    assert collectives._not_tried(HERE, 0) == []
    assert collectives._not_tried(HERE, 2) == []
    (found,) = collectives._not_tried(HERE, 1)
    assert (found.verdict, found.fix) == ("warn", "atorch-ns doctor --nproc 1")


@pytest.mark.processes
def test_two_ranks_sum_a_tensor() -> None:
    found = collectives.check_collectives(HERE)
    assert [(one.check, one.verdict) for one in found] == [("all-reduce", "pass"), ("clock", "pass")]
    assert "2 ranks by gloo" in found[0].text
    assert found[0].figures["bytes_per_second"] > 0


def test_a_clock_that_runs_backwards() -> None:
    assert collectives._clock(False).verdict == "warn"
    assert collectives._clock(True).verdict == "pass"
