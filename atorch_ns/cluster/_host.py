"""What one rank has of a machine without accelerators: its share of cores and memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from atorch_ns.cluster._figure import Figure
from atorch_ns.cluster._hardware import Device, Hardware, Link, Rate
from atorch_ns.cluster._links import LINKS

__all__ = ["CPU_FIGURES", "cpu_device", "cpu_hardware", "machine_memory_bytes"]

CPU_FIGURES: Final = {
    "flops_per_s.float32": Figure(
        60e9, "assumed, per core: AVX2 at 2.5 GHz, three quarters of its peak of 80"
    ),
    "flops_per_s.bfloat16": Figure(60e9, "assumed: as float32; AVX-512 BF16 is faster, emulation slower"),
    "flops_per_s.float16": Figure(30e9, "assumed: half of float32, by conversion"),
    "memory_bytes_per_s": Figure(8e9, "assumed, per core: two channels of DDR4-3200 among six cores"),
    "launch_s": Figure(5e-6, "assumed: host time of one eager operator with autograd"),
}
"""What a core is taken to do until :func:`~atorch_ns.cluster.calibrate` measures it."""

_CGROUPS: Final = Path("/sys/fs/cgroup")


def cpu_device(num_ranks: int, memory_bytes: int | None = None) -> Device:
    """The share of this machine that one of ``num_ranks`` equal ranks has.

    Args:
        num_ranks: ranks on the machine.
        memory_bytes: of one rank; ``None`` for its share of :func:`machine_memory_bytes`.
    """
    cores = max(1.0, (os.cpu_count() or 1) / num_ranks)
    rates = {name: figure.value * cores for name, figure in CPU_FIGURES.items() if name != "launch_s"}
    return Device(
        name="cpu",
        type="cpu",
        memory_bytes=machine_memory_bytes() // num_ranks if memory_bytes is None else memory_bytes,
        memory_bytes_per_s=rates["memory_bytes_per_s"],
        flops_per_s={dtype: rates[f"flops_per_s.{dtype}"] for dtype in ("float32", "bfloat16", "float16")},
        launch_s=CPU_FIGURES["launch_s"].value,
        source="; ".join(dict.fromkeys(figure.source for figure in CPU_FIGURES.values())),
    )


def cpu_hardware(num_ranks: int, memory_bytes: int | None = None) -> Hardware:
    """CPU ranks that talk by gloo."""
    gloo, device = LINKS["gloo"].link("gloo"), cpu_device(num_ranks, memory_bytes)
    to_host = Link(
        name="memory", rate=Rate(device.launch_s, device.memory_bytes_per_s / 2), overlap=0.0, source="a copy"
    )
    return Hardware(device=device, within_node=gloo, between_nodes=gloo, to_host=to_host)


def machine_memory_bytes() -> int:
    """Memory that all processes here may use: the machine's, or less where a cgroup limits it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_limit(path) for path in _limit_files()]
    return min([machine, *(limit for limit in limits if limit is not None)])


def _limit_files() -> list[Path]:
    """Where the memory limits of this process's cgroups may stand, in version 2 and version 1.

    Inside a container the own group is usually mounted as the root.
    """
    files = [_CGROUPS / "memory.max", _CGROUPS / "memory" / "memory.limit_in_bytes"]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return files
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(_CGROUPS / path.strip("/") / "memory.max")
        elif "memory" in controllers.split(","):
            files.append(_CGROUPS / "memory" / path.strip("/") / "memory.limit_in_bytes")
    return files


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() and int(text) > 0 else None
