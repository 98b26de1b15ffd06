"""The user's process's side of a zygote: start it, talk to it, see what became of it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atorch_ns.engine._frames import Receiver, send

__all__ = ["WorkerProcess", "WorkerStart"]

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from atorch_ns.engine._zygote import main; main(*map(int, sys.argv[1:4]))"
)
# Asking CUDA whether it is there would initialise it, and forks could no longer use it.
_NO_CUDA_CONTEXT: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_EXIT_S: Final = 2.0
_ENDING_S: Final = 0.5


@dataclass(frozen=True)
class WorkerStart:
    """What a zygote is started with.

    Attributes:
        setting: a :class:`~atorch_ns.engine._trial_process.Setting`.
        job: the user's objects, packed.
        log: file for what the zygote itself prints.
    """

    setting: Any
    job: bytes
    log: Path


class WorkerProcess:
    """One running zygote.

    It has the parent's folder, module search path and environment, and a process group of its own, so that
    Ctrl-C on a terminal does not reach it: its parent decides. It ends when the parent ends, however that
    ends, because its pipe closes.
    """

    def __init__(self, start: WorkerStart) -> None:
        commands_read, self._commands = os.pipe()
        events_read, events_write = os.pipe()
        self._receiver = Receiver(events_read)
        self._trial_pid: int | None = None
        self._open = [self._commands, events_read]
        self.ready = False
        self.broken: Mapping[str, Any] | None = None
        with tempfile.TemporaryFile() as job, start.log.open("ab") as log:
            pickle.dump((start.setting, start.job), job)
            job.seek(0)
            passed = (commands_read, events_write, job.fileno())
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        _BOOT,
                        *map(str, passed),
                        json.dumps([str(path) for path in sys.path]),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=passed,
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
        """Whether it still runs and listens."""
        return self._process.poll() is None and not self._receiver.closed

    def command(self, message: Mapping[str, Any]) -> None:
        """Sends a message; one that nobody hears any more is lost."""
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
        """How the zygote ended, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)  # its pipe closes a moment before it is gone
        code = self._process.returncode
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
        return f"ended by signal {-code}"

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
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._trial_pid, signal.SIGKILL)
            self._trial_pid = None

    def _close_pipes(self) -> None:
        while self._open:
            os.close(self._open.pop())
