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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from atorch_ns.cluster import OPTIONAL_PACKAGES, installed_packages
from atorch_ns.doctor.base import Finding, Isolated, Place, as_check, call_isolated, failed, passed, warned
from atorch_ns.text import bytes_text, clip_text

_DISK: Final = "disk"
_WRITTEN_BYTES: Final = 32 * 2**20
_FREE_BYTES: Final = 2 * 2**30


@as_check
def check_disk(machine: Place) -> Iterator[Finding]:
    """The folder for checkpoints takes a file, flushed to the disk, and has space left."""
    block = os.urandom(2**20)  # random, so that no file system compresses it
    try:
        with tempfile.NamedTemporaryFile(dir=machine.folder, prefix=".atorch_ns_doctor_") as file:
            began = time.perf_counter()
            for _ in range(_WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())  # else the page cache is timed
            seconds = time.perf_counter() - began
        free = shutil.disk_usage(machine.folder).free
    except OSError as error:
        text = f"the folder for checkpoints, {machine.folder}, cannot be written: {error.strerror or error}"
        yield failed(_DISK, text, "atorch-ns doctor --folder FOLDER   # with one that you may write")
        return
    figures = {"bytes_per_second": _WRITTEN_BYTES / seconds, "free_bytes": free}
    text = f"{bytes_text(_WRITTEN_BYTES / seconds)}/s written and flushed, {bytes_text(free)} free"
    if free >= _FREE_BYTES:
        yield passed(_DISK, text, figures=figures)
    else:
        text += ": a checkpoint of a large model will not fit"
        yield warned(_DISK, text, "df -h .   # and choose another --folder", figures=figures)


_SHARED: Final = Path("/dev/shm")
# Batches of data-loading workers and buffers of NCCL are there; Docker's default is 64 MiB in all.
_SHARED_BYTES_PER_RANK: Final = 256 * 2**20
# For a rank with data-loading workers and a thousand shard files; many systems begin with 1,024.
_OPEN_FILES: Final = 4096


def shared_memory_bytes() -> int | None:
    """Size of the shared memory; ``None`` where the system has no such folder."""
    try:
        stats = os.statvfs(_SHARED)
    except OSError:
        return None
    return stats.f_frsize * stats.f_blocks


@as_check
def check_shared_memory(machine: Place) -> Iterator[Finding]:
    """There is shared memory for the ranks' data-loading workers."""
    name, size = "shared memory", shared_memory_bytes()
    if size is None:
        yield passed(name, "this system has no /dev/shm to run out of")
        return
    enough = machine.num_ranks * _SHARED_BYTES_PER_RANK
    figures = {"size_bytes": size}
    text = f"/dev/shm holds {bytes_text(size)}"
    if size >= enough:
        yield passed(name, text, figures=figures)
        return
    text += f"; {bytes_text(enough)} are advised for {machine.num_ranks} ranks, or workers of data loaders die with 'Bus error'"
    fix = "docker run --shm-size=8g ...   # or --ipc=host; else sudo mount -o remount,size=8G /dev/shm"
    yield warned(name, text, fix, figures=figures)


@as_check
def check_limits(machine: Place) -> Iterator[Finding]:
    """Open files and locked memory are not limited too far."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = locked_bytes == resource.RLIM_INFINITY
    figures = {"open_files": files, "locked_memory_bytes": None if is_unlimited else locked_bytes}
    few_files = files != resource.RLIM_INFINITY and files < _OPEN_FILES
    little_locked = _has_infiniband() and not is_unlimited  # RDMA pins its buffers
    if few_files:
        above = most_files == resource.RLIM_INFINITY or most_files >= _OPEN_FILES  # the hard limit allows it
        text = (
            f"a process may have {files} files open; {_OPEN_FILES} are advised, or loaders with many "
            "workers fail with 'Too many open files'"
        )
        more = "" if above else "   # more by docker run --ulimit nofile=65536, or limits.conf"
        fix = f"ulimit -n {_OPEN_FILES if above else most_files}{more}"
        yield warned("limits", text, fix, figures=figures)
    if little_locked:
        text = f"a process may lock {bytes_text(locked_bytes)} of memory; InfiniBand needs it without a limit"
        fix = "ulimit -l unlimited   # or docker run --ulimit memlock=-1"
        yield warned("limits", text, fix, figures=figures)
    if not few_files and not little_locked:
        memory = "unlimited" if is_unlimited else bytes_text(locked_bytes)
        number = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
        yield passed("limits", f"open files {number}, locked memory {memory}", figures=figures)


def _has_infiniband() -> bool:
    return Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())


_PACKAGES: Final = "packages"
_AT_ONCE: Final = 2
_SHORTEST_S: Final = 60.0


@as_check
def check_packages(machine: Place) -> Iterator[Finding]:
    """Installed optional packages can be imported; each in its own process, which a broken one may end."""
    versions = installed_packages()
    limit = max(machine.timeout_s, _SHORTEST_S)

    def attempt(package: str) -> Isolated:
        return call_isolated(importlib.import_module, package, timeout_s=limit)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = dict(zip(versions, pool.map(attempt, versions), strict=True))
    for package, outcome in results.items():
        if outcome.problem:
            why = clip_text(" ".join(outcome.problem.split()), 300)
            text = f"{package} {versions[package]} is installed and cannot be imported: {why}"
            name = OPTIONAL_PACKAGES[package]
            fix = f"pip install --force-reinstall {name}   # or: pip uninstall {name}"
            yield warned(_PACKAGES, text, fix)
    usable = [f"{package} {versions[package]}" for package, outcome in results.items() if not outcome.problem]
    absent = [package for package in OPTIONAL_PACKAGES if package not in versions]
    rest = f"; not installed: {', '.join(absent)}" if absent else ""
    text = f"usable: {', '.join(usable) or 'none'}{rest}"
    yield passed(_PACKAGES, text, figures={"versions": dict(versions)})


_PORTS: Final = "ports"
_DEFAULT_PORT: Final = 29500  # of torchrun's store


@as_check
def check_ports(machine: Place) -> Iterator[Finding]:
    """Loopback connections work, torchrun's default port is free, and the host's name resolves."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        yield failed(_PORTS, f"no connection over 127.0.0.1 can be made: {error}", "ip link set lo up")
        return
    problems = [*_default_port(), *_host_name()]
    yield from problems
    if not problems:
        yield passed(_PORTS, "loopback connections work, the host's name resolves")


def _default_port() -> Iterator[Finding]:
    if "RANK" in os.environ:  # a launcher that has started this process listens there itself
        return
    port_text = os.environ.get("MASTER_PORT", "")
    port = int(port_text) if port_text.isdecimal() else _DEFAULT_PORT
    try:
        socket.create_server(("127.0.0.1", port)).close()  # sets SO_REUSEADDR, as torchrun does
    except OSError as error:
        text = f"port {port} is taken ({os.strerror(error.errno or 0)}): a torchrun without --standalone fails on it"
        yield warned(_PORTS, text, "torchrun --standalone --nproc-per-node=2 script.py")


def _host_name() -> Iterator[Finding]:
    try:
        socket.getaddrinfo(socket.gethostname(), None)  # gloo listens there
    except OSError as error:
        text = f"this machine's name does not resolve ({error}): jobs of several nodes fail to meet"
        yield warned(_PORTS, text, 'echo "127.0.1.1 $(hostname)" | sudo tee -a /etc/hosts')


_VERSIONS: Final = "versions"
_PYTHON: Final = (3, 11)
_TORCH: Final = (2, 11)


@as_check
def check_versions(machine: Place) -> Iterator[Finding]:
    """Python and torch are new enough, and torch can use the devices that are there."""
    import torch

    old_python = sys.version_info < _PYTHON
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)  # as 2.11.0+cu126
    old_torch = numbers is None or (int(numbers[1]), int(numbers[2])) < _TORCH
    if old_python:
        text = f"Python {platform.python_version()}; 3.11 or later is needed"
        yield failed(_VERSIONS, text, "python3.11 -m venv .venv")
    if old_torch:
        text = f"torch {torch.__version__}; 2.11 or later is needed"
        yield failed(_VERSIONS, text, "pip install --upgrade 'torch>=2.11'")
    if not old_python and not old_torch:
        yield _check_device(torch.__version__)


def _check_device(version: str) -> Finding:
    import torch

    text = f"Python {platform.python_version()}, torch {version}"
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return passed(_VERSIONS, f"{text}, {torch.cuda.device_count()} × {', '.join(sorted(names))}")
    if shutil.which("nvidia-smi") is None:
        return passed(_VERSIONS, f"{text}, no GPU: jobs run on CPUs")
    if torch.version.cuda is None:
        why = "torch was built without CUDA"
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
    else:
        why = "torch cannot use the driver or a device"
        fix = "nvidia-smi   # compare its CUDA version with torch.version.cuda, and see CUDA_VISIBLE_DEVICES"
    return warned(_VERSIONS, f"{text}; there is an NVIDIA driver, but {why}", fix)
