"""Where a search keeps the logs of trials that failed: one folder a search, gone if nothing is in it."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["log_folder", "new_log_folder"]


def new_log_folder(place: Path | None) -> tuple[Path, str]:
    """A folder for the logs of one search, on its first rank.

    It belongs to this search alone: reports of earlier ones name the files of theirs.

    Args:
        place: the folder to make; one with a number behind its name where that is taken. ``None`` for a
            temporary one.

    Returns:
        The folder, and why it is a temporary one although another was asked for; else nothing.
    """
    problem = ""
    if place is not None:
        try:
            return _made(place), ""
        except OSError as error:
            problem = f"logs of trials cannot be kept in {place}: {error}"
    folder = Path(tempfile.mkdtemp(prefix="atorch_ns_trials_"))
    return folder, f"{problem}; they are in {folder}" if problem else ""


@contextlib.contextmanager
def log_folder(shared: Path) -> Iterator[Path]:
    """The folder on this rank's machine; a temporary one of its own where it cannot be made there.

    It is removed at the end if nothing is written in it. The last rank of a machine finds it so, and empty files are
    of ranks that were killed.
    """
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        folder = shared
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="atorch_ns_trials_"))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if path.stat().st_size == 0:
                    path.unlink()
            folder.rmdir()


def _made(place: Path) -> Path:
    for number in itertools.count(1):
        folder = place if number == 1 else place.with_name(f"{place.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("not reached")
