"""Failures of trials: the kind of an exception, its cause in one line, and out-of-memory detection."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from atorch_ns.errors import AtorchError, RankError, StepError
from atorch_ns.search import TrialStatus

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


_TEXTS: Final = re.compile(
    r"""
    CUDA\ out\ of\ memory                          # torch's allocator
    | CUDA\ (driver\ )?error:\ out\ of\ memory     # the runtime's and the driver's own, as of a pinned allocation
    | CUDA_ERROR_OUT_OF_MEMORY | cudaErrorMemoryAllocation
    | CU(BLAS|SPARSE|SOLVER|FFT)_(STATUS_)?ALLOC_FAILED
    | CUDNN_STATUS_(ALLOC_FAILED | INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)
    | Failed\ to\ CUDA\ (calloc|malloc|host\ alloc)    # NCCL
    | Cuda\ failure\ (2\ )?'out\ of\ memory'       # NCCL
    | DefaultCPUAllocator:.*can't\ allocate\ memory
    | not\ enough\ memory:\ you\ tried\ to\ allocate   # torch's CPU allocator
    | Cannot\ allocate\ memory                     # the system, by errno
    | \bout\ of\ memory\b
    """,
    re.VERBOSE,
)
_NOT_MEMORY: Final = re.compile(r"out of resource: shared memory")
"""A Triton kernel that asks for more of a multiprocessor than there is: a smaller batch does not help."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that the device's or the host's memory is full.

    torch has a class for its own allocator's failures only; those of libraries are RuntimeErrors known by their text.
    What cuBLAS says of its handle (``CUBLAS_STATUS_NOT_INITIALIZED``) has other causes too and does not count.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(current, (RuntimeError, OSError)):
            text = str(current)
            if _TEXTS.search(text) and not _NOT_MEMORY.search(text):
                return True
        current = current.__cause__
    return False


# What gloo, NCCL and the store say when the other side has gone.
_LOST_PEER: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "Broken pipe",
    "remote process exited",
    "Socket closed",
    "Failed to recv, got 0 bytes",
    "wait timeout after",
)
_NOT_THE_USERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


class NonFiniteLoss(Exception):
    """The loss of a trial became infinite or NaN."""


class Interrupted(Exception):
    """A trial that was ended from outside, with the status and the reason to report."""

    def __init__(self, status: TrialStatus, reason: str) -> None:
        super().__init__(reason)
        self.status: TrialStatus = status


@dataclass(frozen=True)
class Failure:
    """How a trial failed on one rank.

    Attributes:
        status: as in a report.
        reason: the exception's type and text, and the user's line it came from.
        secondary: whether another rank is the cause: this one was left alone in a collective.
        refused_by: the method that refused, where one did.
    """

    status: TrialStatus
    reason: str
    secondary: bool = False
    refused_by: str | None = None


def explain(error: BaseException, *, applying: bool) -> Failure:
    """Reads an exception.

    Args:
        error: what was raised.
        applying: whether the strategy was still being applied, so that an error of this package's own says
            that it cannot be.
    """
    text = _said(error)
    if isinstance(error, NonFiniteLoss):
        return Failure("non-finite", str(error))
    if isinstance(error, Interrupted):
        return Failure(error.status, str(error))
    if isinstance(error, RankError):
        return Failure("raised", text, secondary=True)
    if is_out_of_memory(error):
        return Failure("out of memory", text)
    if _says(error, _LOST_PEER):
        return Failure("raised", text, secondary=True)
    if isinstance(error, AtorchError) and (applying or isinstance(error, StepError)):
        return Failure("refused", text, refused_by=error.refused_by if applying else None)
    return Failure("raised", text + _place(error))


def _said(error: BaseException) -> str:
    text = str(error).strip()
    short = text if len(text) <= 1000 else text[:997] + "..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    """Whether an error of torch's contains one of the phrases; it has no classes for these."""
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def _place(error: BaseException) -> str:
    """The innermost line that is neither torch's nor this package's, as `` (in forward, model.py:12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    if not own:
        return ""
    frame = own[-1]
    return f" (in {frame.name}, {Path(frame.filename).name}:{frame.lineno})"
