"""Files written whole, quotas of cores, and the end of a group."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from atorch_ns import system
from atorch_ns.cluster.cluster import cpu_device
from atorch_ns.system import cgroup_cores, kill_group, num_usable_cores, write_whole


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "größer", durable=durable)
    before = path.open("rb")
    write_whole(path, b"new", durable=durable)
    with before:
        assert before.read() == "größer".encode()  # a reader of the old file still has it whole
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "plan.json", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o640


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        write_whole(tmp_path / "absent" / "plan.json", b"")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        write_whole(tmp_path / "file" / "plan.json", b"")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "50000 100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2.0),
        ({}, None),
    ],
)
def test_a_quota_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None
) -> None:
    monkeypatch.setattr(system, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert cgroup_cores() == quota
    cores = 8 if quota is None else max(1, int(quota))
    assert num_usable_cores() == cores
    assert cpu_device(2).flops_of("float32") == max(1, cores / 2) * cpu_device(cores).flops_of("float32")


def test_a_pinned_rank_has_its_share_of_cores_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    rates = []
    for cores in (8, 4):  # free, and pinned to the share of two ranks
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        rates.append(cpu_device(2).flops_of("float32"))
    assert rates[0] == rates[1]


def test_a_group_that_is_gone_is_no_error() -> None:
    kill_group(2**22 + 1)  # above the highest number of a process
