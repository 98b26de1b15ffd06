"""Cluster: the processes, nodes, devices and installed packages of a job."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from atorch_ns.cluster import agreement
from atorch_ns.cluster.devices import DEVICES, device_named
from atorch_ns.cluster.hardware import LINKS, Device, Hardware, Link, Rate
from atorch_ns.cluster.kernels import SourcedFigure
from atorch_ns.errors import BackendError, InputError
from atorch_ns.system import cgroup_cores, cgroup_files, num_usable_cores, table_rows

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

CPU_FIGURES: Final = {
    "flops_per_s.float32": SourcedFigure(
        60e9, "assumed, per core: AVX2 at 2.5 GHz, three quarters of its peak of 80"
    ),
    "flops_per_s.bfloat16": SourcedFigure(
        60e9, "assumed: as float32; AVX-512 BF16 is faster, emulation slower"
    ),
    "flops_per_s.float16": SourcedFigure(30e9, "assumed: half of float32, by conversion"),
    "memory_bytes_per_s": SourcedFigure(8e9, "assumed, per core: two channels of DDR4-3200 among six cores"),
    "launch_s": SourcedFigure(5e-6, "assumed: host time of one eager operator with autograd"),
}
"""Assumed speed of a core until :func:`~atorch_ns.cluster.calibrate` measures it."""


def cpu_device(num_ranks: int, memory_bytes: int | None = None) -> Device:
    """The share of this machine that one of ``num_ranks`` equal ranks has.

    Args:
        num_ranks: ranks on the machine.
        memory_bytes: memory of one rank; ``None`` for its share of :func:`machine_memory_bytes`.
    """
    # A pinned rank may use its own share alone, which is not divided again.
    machine = min(os.cpu_count() or 1, cgroup_cores() or math.inf)
    cores = max(1.0, min(num_usable_cores(), machine / num_ranks))
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
    # A copy reads and writes each byte. The copying cores compute nothing meanwhile.
    to_host = Link(
        name="memory", rate=Rate(device.launch_s, device.memory_bytes_per_s / 2), overlap=0.0, source="a copy"
    )
    return Hardware(device=device, within_node=gloo, between_nodes=gloo, to_host=to_host)


def machine_memory_bytes() -> int:
    """Memory that all processes here may use. A cgroup can limit it below the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_limit(path) for path in cgroup_files("memory", "memory.max", "memory.limit_in_bytes")]
    return min([machine, *(limit for limit in limits if limit is not None)])


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() and int(text) > 0 else None  # "max": no limit


OPTIONAL_PACKAGES: Mapping[str, str] = {
    row["module"]: row["distribution"] for row in table_rows(Path(__file__).with_name("packages.csv"))
}
"""Import name → distribution of every package that a built-in method can use."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The environment of a job as a rank sees it. Made by :meth:`detect`, or by hand for planning and tests.

    Attributes:
        world_size: number of processes.
        rank: this process, 0 to ``world_size - 1``.
        local_rank: this process within its node.
        local_world_size: processes on this node.
        distributed: whether the process was started as one of a group (by torchrun or by the caller), even
            if the group has one member.
        device_type: ``"cpu"`` or ``"cuda"``.
        device_name: the device's own name.
        device_memory_bytes: memory of one device; 0 where unknown.
        capability: CUDA compute capability, ``None`` on CPU.
        packages: version of each optional package that is installed.
        torch: version of torch.
        hardware: speeds of devices and links; ``None`` until read from the table or measured.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    distributed: bool = False
    device_type: str = "cpu"
    device_name: str = "cpu"
    device_memory_bytes: int = 0
    capability: tuple[int, int] | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""
    hardware: Hardware | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes, assuming that all have as many processes as this one."""
        return max(1, self.world_size // self.local_world_size)

    @property
    def device(self) -> str:
        """The device of this process, as torch writes it."""
        return f"cuda:{self.local_rank}" if self.device_type == "cuda" else self.device_type

    @property
    def rank_memory_bytes(self) -> int:
        """Memory of one rank's device, on CPU its share of the machine's; 0 where unknown."""
        if self.hardware is not None:
            return self.hardware.device.memory_bytes
        return self.device_memory_bytes // (max(1, self.local_world_size) if self.device_type == "cpu" else 1)

    @property
    def alone(self) -> Cluster:
        """A cluster of this process alone, with the same device and no group."""
        return replace(self, world_size=1, rank=0, local_world_size=1, distributed=False)

    @classmethod
    def detect(cls) -> Cluster:
        """Reads the process group if there is one, else the launcher's environment, and the devices here.

        Raises:
            BackendError: if the launcher's environment holds something else than numbers.
        """
        import torch
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            ranks: dict[str, Any] = {
                "world_size": dist.get_world_size(),
                "rank": dist.get_rank(),
                "distributed": True,
            }
        else:
            world_size = _environment_integer("WORLD_SIZE", 1)
            ranks = {
                "world_size": world_size,
                "rank": _environment_integer("RANK", 0),
                "distributed": "RANK" in os.environ or world_size > 1,  # even with one member
            }
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 1
        local_rank = _environment_integer("LOCAL_RANK", ranks["rank"] % num_devices)
        return cls(
            **ranks,
            local_rank=local_rank,
            local_world_size=_environment_integer("LOCAL_WORLD_SIZE", ranks["world_size"]),
            packages=installed_packages(),
            torch=torch.__version__,
            **_device_facts(local_rank),
        )

    def agree(self, action: Callable[[], T], *, what: str, group: dist.ProcessGroup | None = None) -> T:
        """:func:`~atorch_ns.cluster.agree` over all ranks, or over those of a group."""
        return agreement.agree(action, what=what, distributed=self.distributed, group=group)

    def on_first(self, action: Callable[[], T], *, what: str) -> T:
        """Result of ``action``, which rank 0 runs, on every rank; if it fails, all ranks fail. Collective."""
        return self.from_first(self.agree(lambda: action() if self.rank == 0 else None, what=what))

    def from_first(self, value: T | None) -> T:
        """:func:`~atorch_ns.cluster.from_first` over all ranks."""
        return agreement.from_first(value, distributed=self.distributed)

    def gathered(self, value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
        """:func:`~atorch_ns.cluster.gathered` over all ranks, or over those of a group."""
        return agreement.gather_values(value, distributed=self.distributed, group=group)

    def same_everywhere(self, values: Mapping[str, str]) -> None:
        """:func:`~atorch_ns.cluster.same_everywhere` over all ranks."""
        agreement.same_everywhere(values, distributed=self.distributed)

    def sharing_failures(self, what: str, *, turn: int | None = None) -> AbstractContextManager[None]:
        """:func:`~atorch_ns.cluster.sharing_failures` over all ranks."""
        return agreement.sharing_failures(what, distributed=self.distributed, turn=turn)

    def shared_blocks(self, what: str) -> agreement.SharedBlocks:
        """:class:`~atorch_ns.cluster.agreement.SharedBlocks` of all ranks."""
        return agreement.SharedBlocks(what, distributed=self.distributed)

    def with_hardware(self) -> Cluster:
        """The same cluster with device and link figures from the table. Existing figures are kept.

        On CPU each rank has its share of the machine's cores and memory, or of its cgroup's memory.

        Raises:
            InputError: if the table does not know the device.
        """
        if self.hardware is not None:
            return self
        if self.device_type == "cpu":
            hardware = cpu_hardware(self.local_world_size)
            return replace(self, hardware=hardware, device_memory_bytes=hardware.device.memory_bytes)
        return replace(self, hardware=self._hardware_of_table())

    def _hardware_of_table(self) -> Hardware:
        name = device_named(self.device_name)
        if name is None:
            raise InputError(
                f"the table of devices has no {self.device_name!r}. Describe it in a cluster file and give that, or "
                f"measure it: atorch-ns calibrate. Known: {', '.join(DEVICES)}."
            )
        sheet = DEVICES[name]
        device = replace(sheet.device(name), memory_bytes=self.device_memory_bytes)  # as torch reports it
        within, host = LINKS[sheet.within_node], LINKS[sheet.to_host]
        return Hardware(
            device=device,
            within_node=within.link(sheet.within_node),
            between_nodes=LINKS["ib400"].link("ib400", self.local_world_size),  # assumed: nothing reports it
            to_host=host.link(sheet.to_host),
        )


def _environment_integer(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise BackendError(
            f"the environment variable {name}={text!r} is not a number. Launchers such as torchrun set it; unset "
            "it to run one process."
        ) from None


def _device_facts(local_rank: int) -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(local_rank)
        return {
            "device_type": "cuda",
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "capability": (properties.major, properties.minor),
        }
    return {
        "device_type": "cpu",
        "device_name": platform.processor() or platform.machine(),
        "device_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def installed_packages() -> dict[str, str]:
    """Version by import name of the optional packages that are installed; none is imported."""
    versions = {}
    for module, distribution in OPTIONAL_PACKAGES.items():
        if importlib.util.find_spec(module) is None:  # without importing it
            continue
        try:
            versions[module] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[module] = "unknown"
    return versions
