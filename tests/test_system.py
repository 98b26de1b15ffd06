"""Files written whole, and the end of a group."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from atorch_ns.system import kill_group, write_whole


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


def test_a_group_that_is_gone_is_no_error() -> None:
    kill_group(2**22 + 1)  # above the highest number of a process
