"""Worker process: starts a zygote from the user's process, exchanges messages with it, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from atorch_ns.system import kill_group
from atorch_ns.text import signal_text

_LENGTH: Final = struct.Struct("!I")  # number of bytes of the JSON that follows
_CHUNK: Final = 65536  # capacity of a pipe on Linux


def send(fd: int, message: Mapping[str, Any]) -> None:
    """Writes one message, whole.

    Raises:
        BrokenPipeError: if nobody reads any more.
    """
    body = json.dumps(message).encode()
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]  # a pipe may take a part


class Receiver:
    """Reads messages from a pipe.

    Args:
        fd: the reading end; it stays the caller's.

    Attributes:
        closed: whether the other side has closed the pipe; messages that it sent before are still received.
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
            timeout_s: seconds to wait; ``None`` until there is a message or the other side closes the pipe.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._take_message()
            if message is not None or self.closed:
                return message
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._fd], [], [], remaining_s)[0]:
                return None
            chunk = os.read(self._fd, _CHUNK)
            self._data += chunk
            self.closed = not chunk

    def _take_message(self) -> dict[str, Any] | None:
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        message: dict[str, Any] = json.loads(self._data[_LENGTH.size : end])
        del self._data[:end]
        return message


_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from atorch_ns.system import parent_tie; parent_tie()(); "
    "from atorch_ns.engine.trial.zygote import main; main(*map(int, sys.argv[1:4]))"
)
# Asking CUDA whether it is there would initialise it, and forks could no longer use it.
_NO_CUDA_CONTEXT: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_EXIT_S: Final = 2.0  # time for a zygote to exit after its pipe was closed
_ENDING_S: Final = 0.5  # time between the end of its pipe and its exit


class WorkerProcess:
    """One running zygote.

    It has the parent's folder, module search path and environment, and a process group of its own, so that
    Ctrl-C on a terminal does not reach it: its parent decides. It ends when the parent ends, however that
    ends and whatever it is loading: Linux kills it; elsewhere its pipe closes.

    Args:
        setting: a :class:`~atorch_ns.engine.trial.process.TrialSetting`.
        job: the user's objects, packed.
        log: file for the output of the zygote itself.
    """

    def __init__(self, setting: Any, job: bytes, log: Path) -> None:
        commands_read, self._commands = os.pipe()
        events_read, events_write = os.pipe()
        self._receiver = Receiver(events_read)
        self._trial_pid: int | None = None
        self._open = [self._commands, events_read]
        self.ready = False
        self.broken: Mapping[str, Any] | None = None
        # A file, not a pipe: it can be of any size and is read again by trials that load everything anew.
        with tempfile.TemporaryFile() as job_file, log.open("ab") as output:
            pickle.dump((setting, job), job_file)
            job_file.seek(0)
            fds = (commands_read, events_write, job_file.fileno())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *map(str, fds), json.dumps(list(map(str, sys.path)))],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=fds,
                    env={**os.environ, **_NO_CUDA_CONTEXT},
                    process_group=0,
                )
            except BaseException:
                self._close_pipes()
                raise
            finally:
                os.close(commands_read)
                os.close(events_write)

    @property
    def alive(self) -> bool:
        """True if it still runs and listens."""
        return self._process.poll() is None and not self._receiver.closed

    def command(self, message: Mapping[str, Any]) -> None:
        """Sends a message; it is lost if the zygote is gone."""
        if not self._open:
            return
        with contextlib.suppress(BrokenPipeError):
            send(self._commands, message)

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; ``None`` if none has come in time, or the zygote is gone."""
        message = self._receiver.receive(timeout_s) if self._open else None
        if message is None:
            return None
        if message["is"] == "ready":
            self.ready = True
        elif message["is"] == "broken":
            self.broken = message
        elif message["is"] == "started":
            self._trial_pid = message["pid"]
        elif message["is"] == "ended":
            self._trial_pid = None
        return message

    def how_it_died(self) -> str:
        """Returns how the zygote ended, as a clause."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)  # its pipe closes a moment before it is gone
        code = self._process.returncode
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        return f"ended by {signal_text(-code)}"

    def close(self) -> None:
        """Ends it and the trial that it runs; returns when it is gone. May be called twice."""
        self._close_pipes()
        try:
            self._process.wait(_EXIT_S if self.ready else 0)
        except subprocess.TimeoutExpired:
            # A zygote that still imports listens to nobody. Its group holds no trial: each leads its own.
            self._process.kill()
            self._process.wait()
        if self._trial_pid is not None:
            kill_group(self._trial_pid)
            self._trial_pid = None

    def _close_pipes(self) -> None:
        while self._open:
            os.close(self._open.pop())
