"""Checks of the compiler and of dtypes."""

from __future__ import annotations

import pytest

from atorch_ns.doctor import Place, compute
from atorch_ns.doctor.base import Isolated

HERE = Place(num_ranks=2)


def test_no_compiler_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute.shutil, "which", lambda name: "/bin/false")
    assert "exit code 1" in compute.check_compiler(HERE)[0].text
    monkeypatch.setattr(compute.shutil, "which", lambda name: None)
    (found,) = compute.check_compiler(HERE)
    assert (found.verdict, "apt install" in found.fix) == ("warn", True)


def test_dtypes_are_measured() -> None:
    name, measured = compute.measure_dtypes()
    assert name
    assert not measured["float32"].problem
    assert 0 < measured["bfloat16"].error < 0.02


@pytest.mark.parametrize(
    ("dtype", "measured", "verdict"),
    [
        ("bfloat16", compute.Measured(0.0, 0.0, "RuntimeError: not implemented"), "warn"),
        ("float32", compute.Measured(0.0, 0.0, "RuntimeError: no device"), "fail"),
        ("bfloat16", compute.Measured(0.1, 0.5), "fail"),
        ("bfloat16", compute.Measured(0.1, float("nan")), "fail"),
    ],
)
def test_a_dtype_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, dtype: str, measured: compute.Measured, verdict: str
) -> None:
    fine = compute.Measured(0.1, 0.0)
    value = ("the CPU", {"float32": fine, "bfloat16": fine, "float16": fine, dtype: measured})
    monkeypatch.setattr(compute, "isolated", lambda *_, **__: Isolated(value, ""))
    found = compute.check_dtypes(HERE)
    assert found[0].verdict == verdict
    assert found[0].fix
