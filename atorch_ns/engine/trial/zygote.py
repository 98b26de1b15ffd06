"""The zygote: a helper process that has everything imported and forks a fresh process for every trial.

:mod:`atorch_ns.engine.trial.worker_process` starts one on each rank. It runs no operator on several threads
and never initialises CUDA, so its forks are sound. Where an import has initialised CUDA all the same, every
trial is a new process that loads everything itself, seconds slower. It ends when its parent closes the pipe
or is gone, and takes the running trial with it.

Messages from the parent: ``trial`` (a task and its log file), ``stacks``, ``kill``. To the parent: ``ready``
or ``broken`` once, then ``phase`` and ``report`` of the running trial, and ``ended`` with its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.cluster.process_memory import private_bytes
from atorch_ns.engine.trial.pickling import Unpacked, unpack
from atorch_ns.engine.trial.process import TASK, TrialSetting, be_trial
from atorch_ns.engine.trial.worker_process import Receiver, send
from atorch_ns.method import Registry, load_registry
from atorch_ns.search import TrialTask
from atorch_ns.system import kill_group, parent_tie
from atorch_ns.text import error_text
from atorch_ns.torch_compat import gpu_described, join_fake_group

_PARENT_CHECK_S: Final = 0.5  # between two looks whether the parent is gone
_CPU: Final = torch.device("cpu")
_FRESH: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from atorch_ns.engine.trial.zygote import fresh_trial; "
    "fresh_trial(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
)
_WARM: Final = (  # imported once, here, instead of by every trial that needs them
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.optim",
    "torch._dynamo",
)


def main(commands_fd: int, events_fd: int, job_fd: int) -> None:
    """Serves until the parent closes the pipe or is gone.

    Args:
        commands_fd: pipe to read the parent's messages from.
        events_fd: pipe to write to.
        job_fd: file with the pickled setting and the user's packed objects, from its beginning.
    """
    start = time.monotonic()
    torch.set_num_threads(1)  # trials set their own; threads that exist before a fork are lost in it
    # Packages ask for GPUs when imported. By the driver's library the question leaves this process as it is;
    # by the runtime it would spoil CUDA for every fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        contents = _Loaded.read(job_fd)
        forks = _forks_are_sound(contents.setting.cluster)
    except BaseException as error:
        traceback.print_exc()
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        reason = error_text(error)
        send(events_fd, {"is": "broken", "reason": reason, "missing": missing})
        return
    gc.collect()
    gc.freeze()  # collections in forks write to no object that is here now, so its pages stay shared
    with contextlib.suppress(BrokenPipeError):
        send(events_fd, {"is": "ready", "seconds": time.monotonic() - start})
        _Zygote(contents, commands_fd, events_fd, job_fd=None if forks else job_fd).serve()


def fresh_trial(job_fd: int, report_fd: int, log: str, task: str) -> NoReturn:
    """Runs one trial where forks cannot have CUDA. It loads everything anew.

    Args:
        job_fd: as for :func:`main`.
        report_fd: pipe to write phases and the report to.
        log: the trial's file.
        task: as JSON.
    """
    contents = _Loaded.read(job_fd)
    be_trial(
        contents.job,
        contents.setting,
        contents.registry,
        TASK.validate_json(task),
        loading_bytes=contents.loading_bytes,
        log=Path(log),
        report_fd=report_fd,
    )


@dataclass(frozen=True)
class _Loaded:
    """Objects that trials share: setting, user's objects, methods, and the bytes that loading them took."""

    setting: TrialSetting
    job: Unpacked
    registry: Registry
    loading_bytes: int

    @classmethod
    def read(cls, fd: int) -> _Loaded:
        """Reads them from the file's beginning. The file stays open."""
        os.lseek(fd, 0, os.SEEK_SET)
        with os.fdopen(fd, "rb", closefd=False) as file:
            setting, data = pickle.load(file)  # noqa: S301  # written by the parent, for this process alone
        with _gpu_described(setting.cluster):
            with _process_groups_pretended(setting.cluster):
                job = unpack(data)
            # A process that trains loads these within its limit.
            before = private_bytes(_CPU) or 0
            registry = load_registry()
            registry.restore(job.carried)
            _warm_up()
            loading_bytes = max(0, (private_bytes(_CPU) or 0) - before)
        return cls(setting, job, registry, loading_bytes)


@contextlib.contextmanager
def _process_groups_pretended(cluster: Cluster) -> Iterator[None]:
    # A module may start the process group on import: it would wait for other ranks, or hinder trials' groups.
    real = dist.init_process_group

    def pretend(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            join_fake_group(cluster.rank, cluster.world_size)

    dist.init_process_group = pretend
    try:
        yield
    finally:
        dist.init_process_group = real
        if dist.is_initialized():
            dist.destroy_process_group()


def _warm_up() -> None:
    for module in _WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # An optimizer's first step imports much as well. No backward: on a GPU it starts threads that forks miss.
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()


def _gpu_described(cluster: Cluster) -> contextlib.AbstractContextManager[None]:
    if cluster.device_type != "cuda":
        return contextlib.nullcontext()
    # Packages that ask for the GPU get a description: a fork of a process that has used CUDA cannot use it.
    facts = cluster.device_name, cluster.device_memory_bytes, cluster.capability or (0, 0)
    return gpu_described(cluster.local_rank, *facts)


def _forks_are_sound(cluster: Cluster) -> bool:
    if cluster.device_type != "cuda":
        return True
    pid = os.fork()
    if pid == 0:  # tries: torch does not tell whether an import has used CUDA in a way that spoils forks
        code = 1
        try:
            torch.zeros(1, device=cluster.device)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


@dataclass
class _Trial:
    """The running trial."""

    pid: int
    receiver: Receiver
    messages: list[dict[str, Any]] = field(default_factory=list)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it and whatever it started."""
        kill_group(self.pid)
        self.signal(signal.SIGKILL)


class _Zygote:
    """Loop of the zygote: one command, message or end of a trial at a time."""

    def __init__(self, contents: _Loaded, commands_fd: int, events_fd: int, *, job_fd: int | None) -> None:
        self._contents = contents
        self._job_fd = job_fd  # for trials that load everything anew; None where forks can be trials
        self._commands = Receiver(commands_fd)
        self._commands_fd = commands_fd
        self._events_fd = events_fd
        self._trial: _Trial | None = None
        self._parent = os.getppid()
        self._woken, self._wake = os.pipe()

    def serve(self) -> None:
        """Serves until the parent closes the pipe or is gone."""
        os.set_blocking(self._wake, False)
        # SIGCHLD writes a byte into the pipe that select watches, but only if it has a handler.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            while not self._commands.closed and os.getppid() == self._parent:
                self._wait_for_events()
                self._obey_commands()
                self._pass_on()
                self._reap_trial()
        finally:
            if self._trial is not None:
                self._trial.kill()

    def _wait_for_events(self) -> None:
        sources: list[Any] = [self._commands, self._woken]
        if self._trial is not None and not self._trial.receiver.closed:
            sources.append(self._trial.receiver)
        ready = select.select(sources, [], [], _PARENT_CHECK_S)[0]
        if self._woken in ready:
            os.read(self._woken, 4096)

    def _obey_commands(self) -> None:
        while (command := self._commands.receive(0.0)) is not None:
            if command["do"] == "trial":
                self._fork_trial(TASK.validate_python(command["task"]), Path(command["log"]))
            elif self._trial is not None and command["do"] == "stacks":
                self._trial.signal(signal.SIGUSR1)
            elif self._trial is not None and command["do"] == "kill":
                self._trial.kill()

    def _fork_trial(self, task: TrialTask, log: Path) -> None:
        assert self._trial is None
        reading, writing = os.pipe()
        tie = parent_tie()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads; there are none
            pid = os.fork()
        if pid == 0:
            # From here on this is the trial. It must never run a line of the loop again.
            try:
                tie()
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)  # signals of the trial must not wake the zygote
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (reading, self._commands_fd, self._events_fd, self._woken, self._wake):
                    os.close(fd)
                self._be_trial(task, log, writing)
            finally:
                os._exit(1)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # the trial does so too; whoever comes first
        os.close(writing)
        self._trial = _Trial(pid, Receiver(reading))
        send(self._events_fd, {"is": "started", "pid": pid})

    def _be_trial(self, task: TrialTask, log: Path, report_fd: int) -> NoReturn:
        if self._job_fd is None:
            contents = self._contents
            be_trial(
                contents.job,
                contents.setting,
                contents.registry,
                task,
                loading_bytes=contents.loading_bytes,
                log=log,
                report_fd=report_fd,
            )
        os.set_inheritable(report_fd, True)
        arguments = (self._job_fd, report_fd, str(log), TASK.dump_json(task).decode())
        os.execv(sys.executable, [sys.executable, "-c", _FRESH, *map(str, arguments), json.dumps(sys.path)])

    def _pass_on(self) -> None:
        trial = self._trial
        while trial is not None and (message := trial.receiver.receive(0.0)) is not None:
            send(self._events_fd, message)

    def _reap_trial(self) -> None:
        trial = self._trial
        if trial is None:
            return
        pid, status = os.waitpid(trial.pid, os.WNOHANG)
        if not pid:
            return
        self._pass_on()  # its report may still be in the pipe
        kill_group(trial.pid)
        os.close(trial.receiver.fileno())
        self._trial = None
        send(self._events_fd, {"is": "ended", "exit_code": os.waitstatus_to_exitcode(status)})
