"""Checks of torch on this machine: the compiler, dtypes, backends and an all-reduce."""

from __future__ import annotations

import pytest

from atorch_ns.doctor import Finding, Place, torch_checks
from atorch_ns.doctor.base import Isolated
from atorch_ns.processes import RankEnd

HERE = Place(num_ranks=2)


def test_no_compiler_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checks.shutil, "which", lambda name: "/bin/false")
    assert "exit code 1" in torch_checks.check_compiler(HERE)[0].text
    monkeypatch.setattr(torch_checks.shutil, "which", lambda name: None)
    (found,) = torch_checks.check_compiler(HERE)
    assert (found.verdict, "apt install" in found.fix) == ("warn", True)


def test_dtypes_are_measured() -> None:
    name, measured = torch_checks.measure_dtypes()
    assert name
    assert not measured["float32"].problem
    assert 0 < measured["bfloat16"].error < 0.02


@pytest.mark.parametrize(
    ("dtype", "measured", "verdict"),
    [
        ("bfloat16", torch_checks.MatmulMeasurement(0.0, 0.0, "RuntimeError: not implemented"), "warn"),
        ("float32", torch_checks.MatmulMeasurement(0.0, 0.0, "RuntimeError: no device"), "fail"),
        ("bfloat16", torch_checks.MatmulMeasurement(0.1, 0.5), "fail"),
        ("bfloat16", torch_checks.MatmulMeasurement(0.1, float("nan")), "fail"),
    ],
)
def test_a_dtype_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, dtype: str, measured: torch_checks.MatmulMeasurement, verdict: str
) -> None:
    fine = torch_checks.MatmulMeasurement(0.1, 0.0)
    value = ("the CPU", {"float32": fine, "bfloat16": fine, "float16": fine, dtype: measured})
    monkeypatch.setattr(torch_checks, "call_isolated", lambda *_, **__: Isolated(value, ""))
    found = torch_checks.check_dtypes(HERE)
    assert found[0].verdict == verdict
    assert found[0].fix


HERE = Place(num_ranks=2)


def _collect(monkeypatch: pytest.MonkeyPatch, ends: list[RankEnd]) -> list[Finding]:
    monkeypatch.setattr(torch_checks, "run_local_ranks", lambda *_, **__: ends)
    return torch_checks.check_collectives(Place(num_ranks=2, timeout_s=7))


def test_ranks_that_fail_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = RankEnd(rank=0, code=-9, output="", ended_by_us=True)
    broken = RankEnd(rank=1, code=1, output="one\nRuntimeError: connection refused", ended_by_us=False)
    (found,) = _collect(monkeypatch, [fine, broken])
    assert found.verdict == "fail"
    assert "rank 1 failed: RuntimeError: connection refused" in found.text
    (found,) = _collect(monkeypatch, [fine])
    assert "rank(s) 0 gave no answer within 7 s" in found.text


def test_nccl_without_a_gpu_for_every_rank_is_said() -> None:
    assert torch_checks._not_tried(HERE, 0) == []
    assert torch_checks._not_tried(HERE, 2) == []
    (found,) = torch_checks._not_tried(HERE, 1)
    assert (found.verdict, found.fix) == ("warn", "atorch-ns doctor --nproc 1")


@pytest.mark.processes
def test_two_ranks_sum_a_tensor() -> None:
    found = torch_checks.check_collectives(HERE)
    assert [(one.check, one.verdict) for one in found] == [("all-reduce", "pass"), ("clock", "pass")]
    assert "2 ranks by gloo" in found[0].text
    assert found[0].figures["bytes_per_second"] > 0


def test_a_clock_that_runs_backwards() -> None:
    assert torch_checks._check_clock(False).verdict == "warn"
    assert torch_checks._check_clock(True).verdict == "pass"
