"""Checks of one machine pass here, and fail for the right reason."""

from __future__ import annotations

import resource
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from atorch_ns.doctor import Place, machine
from atorch_ns.doctor.base import Isolated

HERE = Place(num_ranks=2)


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.4.1")
    (found,) = machine.check_versions(HERE)
    assert found.verdict == "fail"
    assert "2.11" in found.fix


def test_a_driver_and_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (found,) = machine.check_versions(HERE)
    assert found.verdict == "warn"
    assert "without CUDA" in found.text


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        found = machine.check_ports(HERE)
    assert "is taken" in found[0].text
    assert "--standalone" in found[0].fix


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "no-such-host.invalid")
    assert "does not resolve" in machine.check_ports(HERE)[-1].text


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: 64 * 2**20)
    (found,) = machine.check_shared_memory(HERE)
    assert found.verdict == "warn"
    assert "64.0 MiB" in found.text
    assert "--shm-size" in found.fix
    assert found.figures == {"size_bytes": 64 * 2**20}


def test_tight_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 65536), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(machine.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(machine, "_has_infiniband", lambda: True)
    files, locked = machine.check_limits(HERE)
    assert files.fix == "ulimit -n 4096"
    assert locked.fix.startswith("ulimit -l unlimited")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (found,) = machine.check_disk(Place(folder=tmp_path / "missing"))
    assert found.verdict == "fail"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "free")(2**20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    assert [found.verdict for found in machine.check_disk(Place(folder=tmp_path))] == ["warn"]
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_packages", lambda: {"apex": "0.1", "torchao": "0.18"})

    def attempt(function: Any, package: str, *, timeout_s: float) -> Isolated:
        return Isolated(None, "RuntimeError: built for another torch" if package == "apex" else "")

    monkeypatch.setattr(machine, "call_isolated", attempt)
    broken, rest = machine.check_packages(HERE)
    assert broken.verdict == "warn"
    assert (
        "apex 0.1 is installed and cannot be imported: RuntimeError: built for another torch" in broken.text
    )
    assert "usable: torchao 0.18" in rest.text
    assert "not installed: fairscale" in rest.text
