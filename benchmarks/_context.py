"""Where and when something was measured. Nothing here tells whose machine it was."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["Context", "date_and_cpu"]

_PACKAGES = ("atorch-ns", "torch", "transformers", "fairscale", "deepspeed", "accelerate")


class Context:
    """Begins when it is made: the load of the machine is read then and at the end."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._started = time.perf_counter()

    def facts(self) -> Mapping[str, Any]:
        """Date, seconds since it was made, machine, versions, and the load average over a minute before and after."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.perf_counter() - self._started, 1),
            "machine": {
                "cpu": _cpu_model(),
                "cores": os.cpu_count(),
                "memory_gib": round(memory / 2**30, 1),
                "system": f"{platform.system()} {platform.machine()}",
            },
            "versions": {"python": platform.python_version(), **_versions()},
            "load average (1 min)": {"before": round(self._load, 2), "after": round(os.getloadavg()[0], 2)},
            "threads per process": os.environ.get("OMP_NUM_THREADS", "torch's default"),
        }


def date_and_cpu() -> str:
    """For one row of a table that several runs have filled: ``2026-11-26, AMD EPYC``."""
    return f"{datetime.now(UTC):%Y-%m-%d}, {_cpu_model()}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    installed = {package: _version(package) for package in _PACKAGES}
    return {package: found for package, found in installed.items() if found is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
