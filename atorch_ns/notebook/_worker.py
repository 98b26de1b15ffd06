"""One worker of a notebook: ``python -m atorch_ns.notebook._worker FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from atorch_ns.errors import InputError
from atorch_ns.notebook._task import ADVICE, SHOWN, Failure, Task, end, store

__all__ = ["main"]


def main(folder: Path) -> int:
    """Calls the task's function and leaves what came of it in the folder; the exit code."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        _show(folder)
    try:
        task = _task(folder)
        value = task.function(*task.arguments)
        if rank == 0:
            _store_value(folder, value)
        end(folder, rank)
    except BaseException as error:
        store(folder, f"failure-{rank}", Failure.of(error))
        return 1
    return 0


def _store_value(folder: Path, value: object) -> None:
    try:
        store(folder, "value", value)
    except OSError:
        raise
    except Exception as error:  # whatever an object's own code raises
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise InputError(
            f"the function returned a {kind} on rank 0, which cannot be sent back: {type(error).__name__}: {error}. "
            f"{ADVICE}"
        ) from None


def _task(folder: Path) -> Task:
    search_path = (folder / "search_path").read_text().split("\n")
    sys.path[:] = [*search_path, *(place for place in sys.path if place not in search_path)]
    return Task.read(folder)  # which imports what the notebook imported


def _show(folder: Path) -> None:
    """All that this process and its children print goes to the file that the notebook reads."""
    handle = os.open(folder / SHOWN, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(handle, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
