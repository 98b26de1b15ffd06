"""Messages over a pipe: JSON objects, each after its length in four bytes."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["Receiver", "send"]

_LENGTH: Final = struct.Struct("!I")
_CHUNK: Final = 65536


def send(fd: int, message: Mapping[str, Any]) -> None:
    """Writes one message, whole.

    Raises:
        BrokenPipeError: if nobody reads any more.
    """
    body = json.dumps(message).encode()
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


class Receiver:
    """Reads messages from a pipe.

    Args:
        fd: the reading end; it stays the caller's.

    Attributes:
        closed: whether the other side has gone; what it sent before has been or will be given out.
    """

    def __init__(self, fd: int) -> None:
        self.closed = False
        self._fd = fd
        self._data = bytearray()

    def fileno(self) -> int:
        """The pipe, for ``select``."""
        return self._fd

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; ``None`` if none has come in time or none will come any more.

        Args:
            timeout_s: seconds to wait; ``None`` until there is a message or the other side goes.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._take()
            if message is not None or self.closed:
                return message
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._fd], [], [], left)[0]:
                return None
            chunk = os.read(self._fd, _CHUNK)
            self._data += chunk
            self.closed = not chunk

    def _take(self) -> dict[str, Any] | None:
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        message: dict[str, Any] = json.loads(self._data[_LENGTH.size : end])
        del self._data[:end]
        return message
