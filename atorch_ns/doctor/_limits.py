"""Checks: shared memory and the limits of a process."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from atorch_ns.doctor._base import Finding, Place

__all__ = ["check_limits", "check_shared_memory", "shared_memory_bytes"]

_SHARED: Final = Path("/dev/shm")
_SHARED_BYTES_PER_RANK: Final = 256 * 2**20
"""Data-loading workers and NCCL hand batches and buffers over here; Docker's default is 64 MiB in all."""
_OPEN_FILES: Final = 4096
"""A rank with data-loading workers and a thousand shard files; many systems begin with 1,024."""


def shared_memory_bytes() -> int | None:
    """Size of the shared memory; ``None`` where the system has no such folder."""
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def check_shared_memory(place: Place) -> list[Finding]:
    """There is shared memory for the ranks' data-loading workers."""
    name, size = "shared memory", shared_memory_bytes()
    if size is None:
        return [Finding(check=name, verdict="pass", text="this system has no /dev/shm to run out of")]
    wanted = place.num_ranks * _SHARED_BYTES_PER_RANK
    figures = {"size_bytes": size}
    text = f"/dev/shm holds {size / 2**20:,.0f} MiB"
    if size >= wanted:
        return [Finding(check=name, verdict="pass", text=text, figures=figures)]
    return [
        Finding(
            check=name,
            verdict="warn",
            text=f"{text}; {wanted / 2**20:,.0f} MiB are advised for {place.num_ranks} ranks, or workers of data "
            "loaders die with 'Bus error'",
            fix="docker run --shm-size=8g ...   # or --ipc=host; else sudo mount -o remount,size=8G /dev/shm",
            figures=figures,
        )
    ]


def check_limits(place: Place) -> list[Finding]:
    """Open files and locked memory are not limited too far."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    figures = {
        "open_files": files,
        "locked_memory_bytes": None if locked == resource.RLIM_INFINITY else locked,
    }
    found = []
    if files != resource.RLIM_INFINITY and files < _OPEN_FILES:
        above = most_files == resource.RLIM_INFINITY or most_files >= _OPEN_FILES
        found.append(
            Finding(
                check="limits",
                verdict="warn",
                text=f"a process may have {files} files open; {_OPEN_FILES} are advised, or loaders with many "
                "workers fail with 'Too many open files'",
                fix=f"ulimit -n {_OPEN_FILES if above else most_files}"
                + ("" if above else "   # more by docker run --ulimit nofile=65536, or limits.conf"),
                figures=figures,
            )
        )
    if _has_infiniband() and locked != resource.RLIM_INFINITY:
        found.append(
            Finding(
                check="limits",
                verdict="warn",
                text=f"a process may lock {locked / 2**20:,.0f} MiB of memory; InfiniBand needs it without a limit",
                fix="ulimit -l unlimited   # or docker run --ulimit memlock=-1",
                figures=figures,
            )
        )
    return found or [
        Finding(
            check="limits",
            verdict="pass",
            text=f"open files {_limit_text(files)}, locked memory "
            + (_limit_text(locked) if locked == resource.RLIM_INFINITY else f"{locked / 2**20:,.0f} MiB"),
            figures=figures,
        )
    ]


def _has_infiniband() -> bool:
    return Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())


def _limit_text(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
