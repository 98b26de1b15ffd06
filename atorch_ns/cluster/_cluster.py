"""What this job runs on: processes, nodes, devices, and the packages at hand."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atorch_ns.cluster._devices import DEVICES, device_named
from atorch_ns.cluster._hardware import Hardware
from atorch_ns.cluster._host import cpu_hardware
from atorch_ns.cluster._links import LINKS
from atorch_ns.errors import BackendError, InputError

__all__ = ["OPTIONAL_PACKAGES", "Cluster", "installed_packages"]

OPTIONAL_PACKAGES: Mapping[str, str] = {
    "fairscale": "fairscale",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "torchao": "torchao",
    "transformer_engine": "transformer-engine",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "apex": "apex",
    "liger_kernel": "liger-kernel",
}
"""Import name → distribution of every package that a built-in method can use."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The setting of a job, as one rank sees it. Made by :meth:`detect`, or by hand for planning and tests.

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
        hardware: how fast devices and links are; ``None`` until somebody asks the table or measures.
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
                "distributed": "RANK" in os.environ or world_size > 1,
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

    @classmethod
    def from_spec(cls, text_or_path: str | Path) -> Cluster:
        """A cluster that is written down, for planning without it.

        Args:
            text_or_path: ``"8xH100-80GB, 16 nodes, ib400"``, ``"4xA100"``, ``"2xcpu"``, or a YAML or JSON file
                with the keys ``devices``, ``nodes``, ``within_node``, ``between_nodes``, ``memory``, ….

        Raises:
            InputError: naming everything that is wrong, and names that are almost right.
        """
        from atorch_ns.cluster._planned import (
            cluster_from_spec,
        )  # it makes a Cluster, so it imports this module

        return cluster_from_spec(text_or_path)

    def with_hardware(self) -> Cluster:
        """The same with figures for its devices and links, from the table; those it has are kept.

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
                f"let calibrate() measure it. Known: {', '.join(DEVICES)}."
            )
        sheet = DEVICES[name]
        device = replace(sheet.device(name), memory_bytes=self.device_memory_bytes)
        within, host = LINKS[sheet.within_node], LINKS[sheet.to_host]
        return Hardware(
            device=device,
            within_node=within.link(sheet.within_node),
            between_nodes=LINKS["ib400"].link("ib400", self.local_world_size),
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
            f"the environment variable {name}={text!r} is no number. Launchers such as torchrun set it; unset "
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
    found = {}
    for module, distribution in OPTIONAL_PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            continue
        try:
            found[module] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[module] = "unknown"
    return found
