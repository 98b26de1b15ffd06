from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from atorch_ns.search.history.journal import HEADER, Journal

FORK = multiprocessing.get_context("fork")


def made(path: Path, *lines: str) -> Journal:
    journal = Journal(path)
    journal.open()
    for line in lines:
        journal.append(line)
    return journal


def test_lines_are_read_once_whoever_wrote_them(tmp_path: Path) -> None:
    reader = made(tmp_path / "deep" / "journal", "a")
    assert reader.new_lines() == ["a"]
    made(tmp_path / "deep" / "journal", "b", "c")
    assert reader.new_lines() == ["b", "c"]
    assert reader.new_lines() == []


def test_readers_ignore_an_incomplete_line_and_writers_cut_it_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = made(path, "a")
    with path.open("ab") as file:
        file.write(b"half")
    assert journal.new_lines() == ["a"]
    journal.append("b")  # without being opened anew: another writer was killed meanwhile
    assert journal.new_lines() == ["b"]
    assert path.read_bytes() == HEADER + b"a\nb\n"


@pytest.mark.parametrize("length", range(len(HEADER)))
def test_a_writer_may_be_killed_in_the_first_line(tmp_path: Path, length: int) -> None:
    path = tmp_path / "journal"
    path.write_bytes(HEADER[:length])
    assert made(path, "a").new_lines() == ["a"]


def test_any_cut_of_the_file_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    made(path, "first", "second")
    content = path.read_bytes()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        journal = Journal(path)
        assert journal.open() == (end > 0 and content[end - 1 : end] != b"\n"), end
        journal.append("third")
        whole = ["first", "second"][: max(0, content[:end].count(b"\n") - 1)]
        assert journal.new_lines() == [*whole, "third"], end


def _append_for_ever(path: Path, name: str) -> None:
    journal = Journal(path)
    for number in range(10**9):
        journal.append(f"{name} {number}")


def test_killed_writers_leave_no_lock_and_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    made(path)
    writers = [FORK.Process(target=_append_for_ever, args=(path, f"w{n}")) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        time.sleep(0.05)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(10)
    journal = Journal(path)
    journal.open()
    journal.append("last")
    *lines, last = journal.new_lines()
    assert last == "last"
    for name in ("w0", "w1", "w2"):
        numbers = [int(line.split()[1]) for line in lines if line.startswith(name)]
        assert numbers == list(range(len(numbers)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["journal"]
