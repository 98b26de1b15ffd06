"""Metrics as lines of JSON in a file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TextIO, final

__all__ = ["JsonlTracker"]


@final
class JsonlTracker:
    """Appends ``{"step": 10, "time": 1767225600.0, "train/loss": 2.25, …}``, a line for each logged step.

    Every line is in the file when ``log`` returns. JSON has no infinite numbers: these are the texts ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``, which ``float`` reads. A run that went back to a checkpoint writes its
    steps again: the last line of a step is the one that counts.

    Args:
        path: the file; its folder is made.
        clock: seconds since 1970, for ``time``.
    """

    def __init__(self, path: str | PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._file: TextIO | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends one line."""
        if self._file is None:
            self._file = self._open()
        row: dict[str, float | str] = {"step": step, "time": round(self._clock(), 3)}
        row |= {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_within_a_line(self.path)
        file = self.path.open("a", encoding="utf-8")
        if torn:  # by a process that was killed: the next row shall be a line of its own
            file.write("\n")
        return file


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
