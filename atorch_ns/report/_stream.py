"""A stream that may break: what is shown is lost then, and nothing else."""

from __future__ import annotations

import logging
from typing import TextIO

__all__ = ["SafeStream"]

log = logging.getLogger("atorch_ns")


class SafeStream:
    """Writes to a stream until that fails once (closed, full disk, a reader that has gone), then to nowhere.

    It has what rich asks of a file.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False

    @property
    def encoding(self) -> str:
        """Of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        try:
            return not self._broken and self._stream.isatty()
        except (AttributeError, ValueError):  # no file, or a closed one
            return False

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes, or drops the text."""
        if not self._broken:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flushes, if there is still something to flush to."""
        if not self._broken:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._broken = True
        log.debug("the search is no longer shown: %s: %s", type(error).__name__, error)
