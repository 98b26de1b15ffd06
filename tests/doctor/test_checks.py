"""Each check passes here, and fails for the right reason."""

from __future__ import annotations

import resource
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from atorch_ns.doctor import (
    CHECKS,
    Finding,
    Place,
    _collectives,
    _compiler,
    _disk,
    _dtypes,
    _examine,
    _limits,
    _packages,
    _ports,
    _versions,
    examine,
)
from atorch_ns.doctor._isolated import Isolated, isolated
from atorch_ns.launch import RankEnd

HERE = Place(num_ranks=2)


def _verdicts(found: list[Finding]) -> list[str]:
    return [finding.verdict for finding in found]


@pytest.mark.parametrize("name", ["versions", "backends", "ports", "shared memory", "limits", "disk"])
def test_the_quick_checks_run_here(name: str, tmp_path: Path) -> None:
    found = CHECKS[name](Place(num_ranks=1, folder=tmp_path))
    assert found
    assert "fail" not in _verdicts(found)
    for finding in found:
        assert finding.text
        assert bool(finding.fix) == (finding.verdict != "pass")


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.4.1")
    (found,) = _versions.check_versions(HERE)
    assert found.verdict == "fail"
    assert "2.11" in found.fix


def test_a_driver_and_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(_versions.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (found,) = _versions.check_versions(HERE)
    assert found.verdict == "warn"
    assert "without CUDA" in found.text


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        found = _ports.check_ports(HERE)
    assert "is taken" in found[0].text
    assert "--standalone" in found[0].fix


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ports.socket, "gethostname", lambda: "no-such-host.invalid")
    assert "does not resolve" in _ports.check_ports(HERE)[-1].text


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_limits, "shared_memory_bytes", lambda: 64 * 2**20)
    (found,) = _limits.check_shared_memory(HERE)
    assert found.verdict == "warn"
    assert "64 MiB" in found.text
    assert "--shm-size" in found.fix
    assert found.figures == {"size_bytes": 64 * 2**20}


def test_tight_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 65536), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(_limits.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(_limits, "_has_infiniband", lambda: True)
    files, locked = _limits.check_limits(HERE)
    assert files.fix == "ulimit -n 4096"
    assert locked.fix.startswith("ulimit -l unlimited")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (found,) = _disk.check_disk(Place(folder=tmp_path / "missing"))
    assert found.verdict == "fail"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "free")(2**20)
    monkeypatch.setattr(_disk.shutil, "disk_usage", lambda path: usage)
    assert _verdicts(_disk.check_disk(Place(folder=tmp_path))) == ["warn"]
    assert list(tmp_path.iterdir()) == []


def test_no_compiler_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiler.shutil, "which", lambda name: "/bin/false")
    assert "exit code 1" in _compiler.check_compiler(HERE)[0].text
    monkeypatch.setattr(_compiler.shutil, "which", lambda name: None)
    (found,) = _compiler.check_compiler(HERE)
    assert (found.verdict, "apt install" in found.fix) == ("warn", True)


def test_dtypes_are_measured() -> None:
    name, measured = _dtypes.measure_dtypes()
    assert name
    assert not measured["float32"].problem
    assert 0 < measured["bfloat16"].error < 0.02


@pytest.mark.parametrize(
    ("dtype", "measured", "verdict"),
    [
        ("bfloat16", _dtypes.Measured(0.0, 0.0, "RuntimeError: not implemented"), "warn"),
        ("float32", _dtypes.Measured(0.0, 0.0, "RuntimeError: no device"), "fail"),
        ("bfloat16", _dtypes.Measured(0.1, 0.5), "fail"),
        ("bfloat16", _dtypes.Measured(0.1, float("nan")), "fail"),
    ],
)
def test_a_dtype_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, dtype: str, measured: _dtypes.Measured, verdict: str
) -> None:
    fine = _dtypes.Measured(0.1, 0.0)
    value = ("the CPU", {"float32": fine, "bfloat16": fine, "float16": fine, dtype: measured})
    monkeypatch.setattr(_dtypes, "isolated", lambda *_, **__: Isolated(value, ""))
    found = _dtypes.check_dtypes(HERE)
    assert found[0].verdict == verdict
    assert found[0].fix


def test_a_package_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packages, "installed_packages", lambda: {"apex": "0.1", "torchao": "0.18"})

    def attempt(function: Any, package: str, *, timeout_s: float) -> Isolated:
        return Isolated(None, "RuntimeError: built for another torch" if package == "apex" else "")

    monkeypatch.setattr(_packages, "isolated", attempt)
    broken, rest = _packages.check_packages(HERE)
    assert broken.verdict == "warn"
    assert (
        "apex 0.1 is installed and cannot be imported: RuntimeError: built for another torch" in broken.text
    )
    assert "usable: torchao 0.18" in rest.text
    assert "not installed: fairscale" in rest.text


def _collect(monkeypatch: pytest.MonkeyPatch, ends: list[RankEnd]) -> list[Finding]:
    monkeypatch.setattr(_collectives, "run_local_ranks", lambda *_, **__: ends)
    return _collectives.check_collectives(Place(num_ranks=2, timeout_s=7))


def test_ranks_that_fail_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = RankEnd(rank=0, code=-9, output="", ended_by_us=True)
    broken = RankEnd(rank=1, code=1, output="one\nRuntimeError: connection refused", ended_by_us=False)
    (found,) = _collect(monkeypatch, [fine, broken])
    assert found.verdict == "fail"
    assert "rank 1 failed: RuntimeError: connection refused" in found.text
    (found,) = _collect(monkeypatch, [fine])
    assert "rank(s) 0 gave no answer within 7 s" in found.text


def test_clocks_that_are_apart() -> None:
    assert _collectives._clock({"skew_s": 2.0, "monotonic": True}).verdict == "warn"
    assert _collectives._clock({"skew_s": 0.0, "monotonic": False}).verdict == "warn"
    assert _collectives._clock({"skew_s": 0.1, "monotonic": True}).verdict == "pass"


def test_nccl_without_a_gpu_for_every_rank_is_said() -> None:
    assert _collectives._not_tried(HERE, 0) == []
    assert _collectives._not_tried(HERE, 2) == []
    (found,) = _collectives._not_tried(HERE, 1)
    assert (found.verdict, found.fix) == ("warn", "atorch-ns doctor --nproc 1")


def test_two_ranks_sum_a_tensor() -> None:
    found = _collectives.check_collectives(HERE)
    assert _verdicts(found) == ["pass", "pass"]
    assert "2 ranks by gloo" in found[0].text
    assert found[0].figures["bytes_per_second"] > 0


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(place: Place) -> list[Finding]:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(_examine, "CHECKS", {"broken": breaks, "disk": _disk.check_disk})
    found = list(examine(HERE))
    assert [one.check for one in found] == ["broken", "disk"]
    assert found[0].verdict == "fail"
    assert "ZeroDivisionError: oh" in found[0].text


def test_isolation() -> None:
    assert isolated(len, [1, 2], timeout_s=60).value == 2
    assert "TypeError" in isolated(len, 1, timeout_s=60).problem
    assert "no answer" in isolated(time.sleep, 60, timeout_s=0.1).problem
