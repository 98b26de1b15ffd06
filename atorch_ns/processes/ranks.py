"""Supervisor of ranks on this machine: starts them, passes signals on, and ends them with the command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from atorch_ns.errors import InputError
from atorch_ns.processes.torchrun import threads_of_rank
from atorch_ns.system import kill_group, num_usable_cores

_LOCK: Final = ".owner"
_PREFIX: Final = "atorch_ns_run_"
_YOUNGEST_S: Final = 60.0  # longer than it takes to lock a folder that was just made


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for the block; also removes this user's folders whose owners were killed.

    The owner holds a lock in it, which the system releases however the owner ends.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / _LOCK).open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNGEST_S:
                _remove_if_free(folder)


def _remove_if_free(folder: Path) -> None:
    with (folder / _LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
        shutil.rmtree(folder, ignore_errors=True)


_POLL_S: Final = 0.02
_GRACE_S: Final = 10.0  # for the other ranks to report, once one has failed
_STOPPING_S: Final = 3.0  # for ranks that were signalled, or whose peer died of a signal
_SHOWN_CHARS: Final = 4000  # characters shown from the end of a rank's output


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """End of a rank.

    Attributes:
        rank: number of the rank.
        code: exit code; negative for the signal that ended it.
        output: the end of its output; empty for a rank whose output was shown.
        ended_by_us: whether it was stopped, for the time limit or because another rank had failed.
    """

    rank: int
    code: int
    output: str
    ended_by_us: bool


class Ranks:
    """``num_ranks`` processes of this interpreter, with the environment that a launcher gives.

    Each has a process group of its own: Ctrl-C on a terminal does not reach it, and whatever it starts ends
    with it. Leave the context to end them; they end too if this process is killed. ::

        with Ranks("package.worker", ["request.json"], 2) as ranks:
            ends = ranks.wait(timeout_s=60)

    Args:
        module: module that each runs, as ``python -m``.
        arguments: the module's arguments.
        num_ranks: the world size.
        shown: whether rank 0 writes to this process's standard error. :class:`RankEnd` has other output.
        quiet: whether SIGINT ends a rank silently, with code 130, until its module decides otherwise.
        variables: environment variables of every rank, which replace those that a launcher sets.

    Raises:
        InputError: if there are no ranks.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        num_ranks: int,
        *,
        shown: bool = True,
        quiet: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if num_ranks < 1:
            raise InputError(f"--nproc={num_ranks}: at least one process is needed.")
        self._module, self._arguments = module, tuple(arguments)
        self._num_ranks, self._shows_output, self._quiet = num_ranks, shown, quiet
        self._variables = dict(variables or {})
        self._grace_s, self._stop_at = _GRACE_S, float("inf")
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[IO[bytes]] = []
        self._stopped_ranks: set[int] = set()

    def __enter__(self) -> Ranks:
        try:
            self._start_job()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, number: int, *, rank: int | None = None) -> None:
        """Sends a signal to one rank, or to all."""
        for position, process in enumerate(self._processes):
            if rank in (None, position) and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def stop(self, number: int, *, rank: int | None = None, within_s: float | None = None) -> None:
        """Sends a signal that is to end one rank, or all.

        Once a rank has failed, the others have three seconds. All end after ``within_s`` if that is given.
        """
        self._grace_s = _STOPPING_S
        if within_s is not None:
            self._stop_at = min(self._stop_at, time.monotonic() + within_s)
        self.send(number, rank=rank)

    def wait(
        self, *, timeout_s: float | None = None, on_poll: Callable[[], object] | None = None
    ) -> list[RankEnd]:
        """Waits for all to end. Never raises for a failure.

        After a failure the others have ten seconds to report it; three if a signal left no time to tell them.

        Args:
            timeout_s: seconds after which all are ended.
            on_poll: called some times a second while ranks run.
        """
        limit = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while any(code is None for code in self._exit_codes()):
            now = time.monotonic()
            if now > min(limit, self._stop_at):
                self.close_ranks()
                break
            if failures := [code for code in self._exit_codes() if code]:
                grace_s = _STOPPING_S if min(failures) < 0 else self._grace_s
                limit = min(limit, now + grace_s)
            if on_poll is not None:
                on_poll()
            time.sleep(_POLL_S)
        return [
            RankEnd(
                rank=rank,
                code=process.wait(),
                output=self.read_output(rank).decode(errors="replace")[-_SHOWN_CHARS:].strip(),
                ended_by_us=rank in self._stopped_ranks,
            )
            for rank, process in enumerate(self._processes)
        ]

    def read_output(self, rank: int, offset: int = 0) -> bytes:
        """Returns a rank's printed bytes from ``offset`` on. Empty for a rank whose output is shown."""
        file = self._files[rank].fileno()  # its position is shared with the rank: do not move it
        return os.pread(file, max(0, os.fstat(file).st_size - offset), offset)

    def close_ranks(self) -> None:
        """Ends every rank that still runs, and the processes that it has started."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._stopped_ranks.add(rank)
            kill_group(process.pid)  # of a rank that has ended too: what it started may live on
            process.wait()

    def close(self) -> None:
        """Ends the ranks and removes their files; may be called twice."""
        self.close_ranks()
        for file in self._files:
            file.close()
        self._stack.close()

    def _start_job(self) -> None:
        folder = self._stack.enter_context(scratch_folder())
        port = self._stack.enter_context(reserve_port())
        reading, write_end = os.pipe()
        self._stack.callback(os.close, write_end)  # parent_guard ends the ranks when it is closed
        try:
            with _interrupts_held_back():
                self._start_ranks(folder, port, reading)
        finally:
            os.close(reading)

    def _start_ranks(self, folder: Path, port: int, reading: int) -> None:
        how = "quiet" if self._quiet else "loud"
        program = [sys.executable, "-m", "atorch_ns.processes.parent_guard", str(reading), how, self._module]
        for rank in range(self._num_ranks):
            output = (folder / f"output_{rank}").open("w+b")
            self._files.append(output)
            stream = sys.stderr if self._shows_output and rank == 0 and _is_real(sys.stderr) else output
            self._processes.append(
                subprocess.Popen(
                    [*program, *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    env={**os.environ, **self._rank_environment(rank, port)},
                    pass_fds=(reading,),
                    process_group=0,
                )
            )

    def _rank_environment(self, rank: int, port: int) -> dict[str, str]:
        number = str(self._num_ranks)
        threads = str(threads_of_rank(num_usable_cores(), self._num_ranks))
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": number,
            "LOCAL_WORLD_SIZE": number,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            "PYTHONPATH": path,
            **self._variables,
        }

    def _exit_codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]


def run_local_ranks(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    *,
    timeout_s: float | None = None,
    shown: bool = True,
    patient: bool = False,
) -> list[RankEnd]:
    """Runs ranks to their end; signals end them. Call it on the main thread; see :class:`Ranks`.

    Args:
        module, arguments, num_ranks, shown: as in :class:`Ranks`.
        timeout_s: seconds after which the ranks are ended.
        patient: whether the first Ctrl-C goes to rank 0 alone, which may take its time to end the work. A
            second one ends all. Otherwise ranks have three seconds.

    Raises:
        SystemExit: with 128 and the signal's number, if one ended the ranks.
    """
    ranks = Ranks(module, arguments, num_ranks, shown=shown, quiet=True)
    # Handlers first: a signal may come while ranks start.
    with _passing_on(ranks, patient) as received, ranks:
        ends = ranks.wait(timeout_s=timeout_s)
    if received and any(end.code for end in ends):
        raise SystemExit(128 + received[-1])
    return ends


@contextlib.contextmanager
def _passing_on(ranks: Ranks, patient: bool) -> Iterator[list[int]]:
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if received and number == signal.SIGINT:  # the second signal: without any grace
            ranks.close_ranks()
        received.append(number)
        if patient and number == signal.SIGINT:
            ranks.stop(number, rank=0)
        else:
            ranks.stop(number, within_s=_STOPPING_S)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    # Processes inherit the mask and unblock SIGINT themselves, so that none gets it while Python starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Reserves a port of 127.0.0.1 while the block runs. The system gives it to no other process.

    It stays bound, not listening, with SO_REUSEADDR: a server that sets it too, as torch's store, can listen.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        yield port


def _is_real(stream: Any) -> bool:
    try:  # a stream that was replaced may have no file descriptor that a child can write to
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
