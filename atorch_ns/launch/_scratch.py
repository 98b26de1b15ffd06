"""Temporary folders that do not stay behind a process that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["scratch_folder"]

_LOCK: Final = ".owner"
_PREFIX: Final = "atorch_ns_run_"
_YOUNGEST_S: Final = 60.0  # longer than it takes to lock a folder that was just made


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for the block. Those that processes left which were killed go too, of this user.

    The owner holds a lock in it, which the system lets go of however the owner ends.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / _LOCK).open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNGEST_S:
                _remove_if_free(folder)


def _remove_if_free(folder: Path) -> None:
    with (folder / _LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
        shutil.rmtree(folder, ignore_errors=True)
