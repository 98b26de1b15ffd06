"""Description of a machine for a bug report: versions, devices, limits; no secrets, names or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from atorch_ns._version import __version__
from atorch_ns.cluster import OPTIONAL_PACKAGES
from atorch_ns.cluster.cluster import machine_memory_bytes
from atorch_ns.doctor.machine import shared_memory_bytes
from atorch_ns.system import cgroup_cores, cpu_model, num_usable_cores

_PACKAGES: Final = (
    "torch", "numpy", "pydantic", "optuna", "grpcio", "protobuf", "typer", "rich", "cloudpickle", "triton",
    "accelerate", "peft", "bitsandbytes", "safetensors", "tensorboard", "wandb",
    *OPTIONAL_PACKAGES.values(),
)  # fmt: skip
# Switches and numbers, shown with their values; all others may hold addresses, paths or secrets.
_VARIABLES: Final = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE",
    "NCCL_ALGO", "NCCL_PROTO", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISTRIBUTED_DEBUG", "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE", "TORCH_LOGS", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "HF_HUB_OFFLINE", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
)  # fmt: skip
# Shown as set or not, without their values.
_SEEN: Final = (
    "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "LD_PRELOAD", "ATORCH_NS_ENGINE_TOKEN",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """The environment as plain values; sizes have ``bytes`` in their names."""
    return {
        "schema": 1,
        "atorch_ns": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": _system_info(),
        "cpu": _cpu_info(),
        "memory": _memory_info(),
        "torch": _torch_info(),
        "devices": _device_info(),
        "packages": _package_versions(),
        "methods": _methods_by_package(),
        "variables": _environment_variables(os.environ),
    }


def _system_info() -> dict[str, Any]:
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    return {
        "os": release.get("PRETTY_NAME", platform.system()),
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "machine": platform.machine(),
        "in_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "virtual_environment": sys.prefix != sys.base_prefix,
    }


def _cpu_info() -> dict[str, Any]:
    return {
        "model": cpu_model(),
        "cores": os.cpu_count() or 1,
        "usable_cores": num_usable_cores(),
        "cgroup_cores": cgroup_cores(),
    }


def _memory_info() -> dict[str, Any]:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "machine_bytes": machine,
        "usable_bytes": machine_memory_bytes(),
        "shared_memory_bytes": shared_memory_bytes(),
        "locked_memory_bytes": None if locked_bytes == resource.RLIM_INFINITY else locked_bytes,
        "open_files": None if files == resource.RLIM_INFINITY else files,
    }


def _torch_info() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    there = dist.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi", "ucc")
            if there and getattr(dist, f"is_{name}_available", bool)()  # bool() is False
        ],
        "threads": torch.get_num_threads(),
    }


def _device_info() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
        for each in every
    ]


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in sorted(set(_PACKAGES)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _methods_by_package() -> dict[str, list[str]]:
    from atorch_ns.method import load_registry  # imports every method, and torch with them

    registry = load_registry()
    methods: dict[str, list[str]] = {}
    for method in registry:
        methods.setdefault(registry.origin(method.name), []).append(method.name)
    return methods


def _environment_variables(environ: Mapping[str, str]) -> dict[str, str]:
    values = {name: environ[name] for name in _VARIABLES if name in environ}
    return {**values, **{name: "(set)" for name in _SEEN if name in environ}}
