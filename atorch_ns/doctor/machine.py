"""Checks of one machine: disk, shared memory, limits, packages, ports, and versions of Python and torch."""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from atorch_ns.cluster import OPTIONAL_PACKAGES, installed_packages
from atorch_ns.doctor.base import Finding, Isolated, Place, failed, isolated, passed, warned
from atorch_ns.text import bytes_text

_DISK: Final = "disk"
_WRITTEN_BYTES: Final = 32 * 2**20
_FREE_BYTES: Final = 2 * 2**30


def check_disk(place: Place) -> list[Finding]:
    """The folder for checkpoints takes a file, flushed to the disk, and has space left."""
    block = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=place.folder, prefix=".atorch_ns_doctor_") as file:
            began = time.perf_counter()
            for _ in range(_WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
        free = shutil.disk_usage(place.folder).free
    except OSError as error:
        return [
            failed(
                _DISK,
                f"the folder for checkpoints, {place.folder}, cannot be written: {error.strerror or error}",
                "atorch-ns doctor --folder FOLDER   # with one that you may write",
            )
        ]
    figures = {"bytes_per_second": _WRITTEN_BYTES / seconds, "free_bytes": free}
    text = f"{bytes_text(_WRITTEN_BYTES / seconds)}/s written and flushed, {bytes_text(free)} free"
    if free >= _FREE_BYTES:
        return [passed(_DISK, text, figures=figures)]
    return [
        warned(
            _DISK,
            f"{text}: a checkpoint of a large model will not fit",
            "df -h .   # and choose another --folder",
            figures=figures,
        )
    ]


_SHARED: Final = Path("/dev/shm")
_SHARED_BYTES_PER_RANK: Final = 256 * 2**20
"""Data-loading workers and NCCL exchange batches and buffers there; Docker's default is 64 MiB in all."""
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
        return [passed(name, "this system has no /dev/shm to run out of")]
    wanted = place.num_ranks * _SHARED_BYTES_PER_RANK
    figures = {"size_bytes": size}
    text = f"/dev/shm holds {bytes_text(size)}"
    if size >= wanted:
        return [passed(name, text, figures=figures)]
    return [
        warned(
            name,
            f"{text}; {bytes_text(wanted)} are advised for {place.num_ranks} ranks, or workers of data "
            "loaders die with 'Bus error'",
            "docker run --shm-size=8g ...   # or --ipc=host; else sudo mount -o remount,size=8G /dev/shm",
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
            warned(
                "limits",
                f"a process may have {files} files open; {_OPEN_FILES} are advised, or loaders with many "
                "workers fail with 'Too many open files'",
                f"ulimit -n {_OPEN_FILES if above else most_files}"
                + ("" if above else "   # more by docker run --ulimit nofile=65536, or limits.conf"),
                figures=figures,
            )
        )
    if _has_infiniband() and locked != resource.RLIM_INFINITY:
        found.append(
            warned(
                "limits",
                f"a process may lock {bytes_text(locked)} of memory; InfiniBand needs it without a limit",
                "ulimit -l unlimited   # or docker run --ulimit memlock=-1",
                figures=figures,
            )
        )
    return found or [
        passed(
            "limits",
            f"open files {_limit_text(files)}, locked memory "
            + (_limit_text(locked) if locked == resource.RLIM_INFINITY else bytes_text(locked)),
            figures=figures,
        )
    ]


def _has_infiniband() -> bool:
    return Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())


def _limit_text(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


_PACKAGES: Final = "packages"
_AT_ONCE: Final = 2
_SHORTEST_S: Final = 60.0


def check_packages(place: Place) -> list[Finding]:
    """Each installed optional package is imported in a process of its own: a broken one may end its interpreter."""
    versions = installed_packages()
    limit = max(place.timeout_s, _SHORTEST_S)

    def attempt(package: str) -> Isolated:
        return isolated(_import, package, timeout_s=limit)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        tried = dict(zip(versions, pool.map(attempt, versions), strict=True))
    found = [
        warned(
            _PACKAGES,
            f"{package} {versions[package]} is installed and cannot be imported: {_short(outcome.problem)}",
            f"pip install --force-reinstall {OPTIONAL_PACKAGES[package]}"
            f"   # or: pip uninstall {OPTIONAL_PACKAGES[package]}",
        )
        for package, outcome in tried.items()
        if outcome.problem
    ]
    usable = [f"{package} {versions[package]}" for package, outcome in tried.items() if not outcome.problem]
    absent = [package for package in OPTIONAL_PACKAGES if package not in versions]
    text = f"usable: {', '.join(usable) or 'none'}" + (
        f"; not installed: {', '.join(absent)}" if absent else ""
    )
    return [*found, passed(_PACKAGES, text, figures={"versions": dict(versions)})]


def _import(package: str) -> None:
    importlib.import_module(package)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


_PORTS: Final = "ports"
_DEFAULT_PORT: Final = 29500
"""Where torchrun's store listens by default."""


def check_ports(place: Place) -> list[Finding]:
    """A port can be had on the loopback interface, torchrun's default is free, and the host's name resolves."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=5):
                pass
    except OSError as error:
        return [failed(_PORTS, f"no connection over 127.0.0.1 can be made: {error}", "ip link set lo up")]
    # A launcher that has started this process listens there itself.
    found = [*([] if "RANK" in os.environ else _default_port()), *_host_name()]
    return found or [passed(_PORTS, "loopback connections work, the host's name resolves")]


def _default_port() -> list[Finding]:
    port = int(os.environ.get("MASTER_PORT", _DEFAULT_PORT)) if _is_port() else _DEFAULT_PORT
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError as error:
            return [
                warned(
                    _PORTS,
                    f"port {port} is taken ({error.strerror}): a torchrun without --standalone fails on it",
                    "torchrun --standalone --nproc-per-node=2 script.py",
                )
            ]
    return []


def _is_port() -> bool:
    return os.environ.get("MASTER_PORT", str(_DEFAULT_PORT)).isdecimal()


def _host_name() -> list[Finding]:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return [
            warned(
                _PORTS,
                f"this machine's name does not resolve ({error}): jobs of several nodes fail to meet",
                'echo "127.0.1.1 $(hostname)" | sudo tee -a /etc/hosts',
            )
        ]
    return []


_VERSIONS: Final = "versions"
_PYTHON: Final = (3, 11)
_TORCH: Final = (2, 11)


def check_versions(place: Place) -> list[Finding]:
    """Python and torch are new enough, and torch can use the devices that are there."""
    import torch

    found = []
    if sys.version_info < _PYTHON:
        found.append(
            failed(
                _VERSIONS,
                f"Python {platform.python_version()}; 3.11 or later is needed",
                "python3.11 -m venv .venv",
            )
        )
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _TORCH:
        found.append(
            failed(
                _VERSIONS,
                f"torch {torch.__version__}; 2.11 or later is needed",
                "pip install --upgrade 'torch>=2.11'",
            )
        )
    return found or [_device(torch.__version__)]


def _device(version: str) -> Finding:
    import torch

    text = f"Python {platform.python_version()}, torch {version}"
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return passed(_VERSIONS, f"{text}, {torch.cuda.device_count()} × {', '.join(sorted(names))}")
    if shutil.which("nvidia-smi") is None:
        return passed(_VERSIONS, f"{text}, no GPU: jobs run on CPUs")
    why = (
        "torch was built without CUDA"
        if torch.version.cuda is None
        else "torch cannot use the driver or a device"
    )
    return warned(
        _VERSIONS,
        f"{text}; there is an NVIDIA driver, but {why}",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        if torch.version.cuda is None
        else "nvidia-smi   # compare its CUDA version with torch.version.cuda, and see CUDA_VISIBLE_DEVICES",
    )
