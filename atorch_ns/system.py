"""Operating system: tables, files, the CPU's model, a process's output, stacks, parent; light to import."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import faulthandler
import functools
import os
import platform
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
"""Constant from Linux's prctl.h."""

_CGROUPS: Final = Path("/sys/fs/cgroup")


@functools.cache
def table_rows(path: Path) -> tuple[Mapping[str, str], ...]:
    """The rows of a CSV table, by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def write_whole(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Writes next to ``path`` and renames, so that a reader sees the old file or the new; text as UTF-8.

    Args:
        path: the file to make or to replace.
        content: its whole content.
        durable: whether the content is synced to the disk before the rename, for files that outlive a crash.

    Raises:
        OSError: if the folder is missing or cannot be written; nothing is left behind.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def num_usable_cores() -> int:
    """Cores that this process may use: those of its affinity mask, or fewer by a cgroup's quota; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    quota = cgroup_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_cores() -> float | None:
    """Cores whose time this process's cgroups may use; ``None`` without a quota."""
    quotas = []
    for path in cgroup_files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            quota, *period = path.read_text(encoding="ascii").split()
            period = period or [path.with_name("cpu.cfs_period_us").read_text(encoding="ascii")]
            quotas.append(int(quota) / int(period[0]))
    return min((quota for quota in quotas if quota > 0), default=None)  # below 0: no limit


def cgroup_files(controller: str, name: str, name_v1: str) -> list[Path]:
    """Candidate files of this process's cgroups, in versions 2 and 1.

    Inside a container the process's own group is usually mounted as the root.

    Args:
        controller: ``"memory"`` or ``"cpu"``.
        name, name_v1: names of the file in versions 2 and 1.
    """
    files = [_CGROUPS / name, _CGROUPS / controller / name_v1]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return files
    for line in lines:  # version 2 lists no controllers
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(_CGROUPS / path.strip("/") / name)
        elif controller in controllers.split(","):
            files.append(_CGROUPS / controller / path.strip("/") / name_v1)
    return files


def redirect_output(path: Path) -> None:
    """Appends this process's output, including that of C libraries, to a file. Replaced streams stay."""
    with path.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def arm_stack_dumps(limit_s: float, file: int = 2) -> None:
    """Writes all threads' stacks on SIGUSR1 and on a crash, and ends this process after ``limit_s`` seconds.

    Args:
        limit_s: seconds after which the parent no longer waits for the process.
        file: descriptor that takes stacks on SIGUSR1 and at the end; a crash writes to the standard error.
    """
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=file)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=file)


def parent_tie() -> Callable[[], None]:
    """A function that a new process calls first, so that it is killed when its starting thread ends (Linux).

    In a fork it also ends a process whose parent has ended before. The C library is looked up earlier.
    """
    maker = os.getpid()
    prctl: Any = None
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if maker not in (os.getpid(), os.getppid()):
            os._exit(1)

    return tie


def kill_group(pid: int) -> None:
    """Kills the process group led by ``pid``, if a process is left in it.

    The group id cannot be reused while a process is left.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def cpu_model() -> str:
    """The CPU's model, or its architecture where the system names no model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
