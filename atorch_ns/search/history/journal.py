"""Journal: a text file to which several processes append lines, none of which is lost or half read."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from atorch_ns.errors import InputError

HEADER = b'{"format":"atorch_ns search history","version":1}\n'  # the first line of every journal
_OPTUNA = b'{"op_code":'  # the first bytes of files that earlier versions wrote with Optuna


class OptunaJournalError(InputError):
    """The history is a file that an earlier version wrote with Optuna."""


class Journal:
    """One file of lines. A writer holds a lock on the file itself, which ends with its process.

    A line that a killed writer left incomplete is ignored by readers and cut off by the next writer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def open(self) -> bool:
        """Makes the file and its folder if there are none. Returns whether it cut off an incomplete line.

        Raises:
            OptunaJournalError: if an earlier version wrote the file.
            ValueError: if it is not a journal.
            OSError: if it cannot be read and written.
        """
        if self._path.exists():
            self._check_header()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._open_locked_file() as (_, cut):
            return cut

    def append(self, line: str) -> None:
        """Adds a line, which is on the disk when this returns."""
        with self._open_locked_file() as (file, _):
            file.write(line.encode() + b"\n")
            _flush_to_disk(file)

    def new_lines(self) -> list[str]:
        """The complete lines that were added since the last call, by any process; at first all of them.

        Raises:
            OptunaJournalError: if an earlier version wrote the file.
            ValueError: if it is not a journal.
            OSError: if it cannot be read.
        """
        if self._offset == 0:
            self._check_header()
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # drops a line that is still being written
        lines = whole.decode().split("\n")[:-1]
        first = 1 if self._offset == 0 else 0  # the header is not an entry
        self._offset += len(whole)
        return lines[first:]

    @contextlib.contextmanager
    def _open_locked_file(self) -> Iterator[tuple[IO[bytes], bool]]:
        with self._path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file gives the lock back
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            cut = file.read() not in (b"", b"\n")  # the last line is incomplete because its writer was killed
            if cut:
                file.seek(0)
                size = file.read().rfind(b"\n") + 1
                file.truncate(size)
            if size == 0:
                file.write(HEADER)
            if cut or size == 0:
                _flush_to_disk(file)
            yield file, cut  # ready to append a line

    def _check_header(self) -> None:
        if not self._path.is_file():
            raise ValueError("it is not a regular file")
        with self._path.open("rb") as file:
            first = file.read(len(HEADER))
        if first.startswith(_OPTUNA):
            raise OptunaJournalError(
                f"the history {self._path} is an Optuna journal, which earlier versions wrote and this one does not "
                "read. Name a new file for the history, or move this one away."
            )
        if not HEADER.startswith(first):  # a prefix of it is a truncated header
            raise ValueError("its first line does not match a history of this version")


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()  # empties Python's buffer, as fsync writes only the system's buffers
    os.fsync(file.fileno())
