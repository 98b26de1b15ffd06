"""How often the system has ended a process for want of memory (Linux)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["oom_kills"]

_CGROUPS: Final = Path("/sys/fs/cgroup")


def oom_kills() -> tuple[int, ...]:
    """Counters of this process's memory cgroup and of the machine; any that grows tells of such an end.

    Sources: ``memory.events`` (cgroup v2), ``memory.oom_control`` (v1) and ``/proc/vmstat``, each with a line
    ``oom_kill <count>``. Empty where the system has none of them.
    """
    counts = (_count(path) for path in (*_own_groups(), Path("/proc/vmstat")))
    return tuple(count for count in counts if count is not None)


def _own_groups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
            # In a container the path is that of the host, and the group itself is mounted at the root.
            files.append(_CGROUPS / "memory" / "memory.oom_control")
    return files


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines)
    return next((int(words[1]) for words in found if len(words) == 2 and words[0] == "oom_kill"), None)
