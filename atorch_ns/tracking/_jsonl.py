"""Metrics as lines of JSON in a file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any, final

from atorch_ns.tracking._numbers import Numbers

__all__ = ["JsonlTracker"]


@final
class JsonlTracker:
    """Appends ``{"step": 10, "time": 1767225600.0, "train/loss": 2.25, …}``, a line for each logged step.

    Every line is in the file when ``log`` returns, or, on a full disk, nothing of it. JSON has no infinite numbers:
    these are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float`` reads. A step can have several
    lines: numbers of the caller's own have lines of their own, and a run that went back to a checkpoint writes its
    steps again. The last value of each metric of a step is the one that counts.

    Args:
        path: the file; its folder is made.
        clock: seconds since 1970, for ``time``.
    """

    def __init__(self, path: str | PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._numbers = Numbers()
        self._file: FileIO | None = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Appends one line."""
        if self._file is None:
            self._file = self._open()
        row: dict[str, float | str] = {"step": step, "time": round(self._clock(), 3)}
        row |= {name: _plain(value) for name, value in self._numbers.of(metrics).items()}
        try:
            _append(self._file, (json.dumps(row, allow_nan=False) + "\n").encode())
        except OSError:
            self.close()  # opened again by the next step, which looks for a torn line
            raise

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_within_a_line(self.path)
        # Unbuffered: a buffer would keep what a full disk refuses, and write the rest of it later.
        file = FileIO(self.path, "a")
        if torn:  # by a process that was killed: the next row shall be a line of its own
            try:
                _append(file, b"\n")
            except OSError:
                file.close()
                raise
        return file


def _append(file: FileIO, data: bytes) -> None:
    """Writes all of it or, if the system lets us, nothing."""
    start = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), start)
        raise


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
