"""Memory of a process: tensors, all that a container or a GPU counts, and its growth over steps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import torch

from atorch_ns.text import bytes_text
from atorch_ns.torch_compat import CpuMemoryRecord

log = logging.getLogger(__name__)

_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_FORGET_PEAK: Final = "5"  # resets VmHWM (proc_pid_clear_refs(5))

LONG_RUN: Final = 1000
"""Assumed number of steps in a run that a measurement of a few steps represents."""
_LEVEL: Final = 0.01
"""Largest share that a doubling adds to level memory: six more, to a long run, add a prediction's error."""
_FEWEST: Final = 8
"""Steps before growth is judged: the first two make states and buckets, and a doubling needs a half."""

_LEAK: Final = 1.5
"""Growth in a doubling over that in the one before that means a leak: a leak has 2, a fragmenting heap 1."""
_FEWEST_TO_SAY: Final = 64
"""Steps before a job is said to grow: three doublings in which it did."""
_CONFIRMING_STEPS: Final = 16
"""Further steps in which growth must continue. Filling a cache once or a validation is not growth."""


def private_bytes(device: torch.device) -> int | None:
    """Bytes that this process holds now; ``None`` where that is not known.

    On the CPU (Linux): private memory as ``RLIMIT_DATA`` counts it (``VmData``), less the C library's free
    bytes. On CUDA: the memory that torch's allocator has reserved.
    """
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    total = data_bytes()
    return None if total is None else total - unused_bytes()


def data_bytes() -> int | None:
    """Private memory of this process as ``RLIMIT_DATA`` counts it; ``None`` where the system does not say."""
    return _read_status()["VmData"] or None


def unused_bytes() -> int:
    """Bytes that glibc keeps for later allocations; 0 with another C library."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _MallocInfo
    return int(library.mallinfo2().fordblks)


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; of its fields only ``fordblks``, the free bytes, is read."""

    _fields_: ClassVar = [(f"field_{index}", ctypes.c_size_t) for index in range(8)]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def _read_status() -> dict[str, int]:
    sizes = dict.fromkeys(("VmData", "VmHWM", "RssAnon", "RssFile", "RssShmem"), 0)
    lines: list[str] = []
    with contextlib.suppress(OSError):  # another system, or /proc is not mounted
        lines = _STATUS.read_text().splitlines()
    for line in lines:
        name, _, value = line.partition(":")
        if name in sizes:
            sizes[name] = int(value.split()[0]) * 2**10  # /proc counts in KiB
    return sizes


class ProcessMemory:
    """Tracks the memory that this process takes beyond its memory at construction.

    On the CPU (Linux) that is the kernel's peak of private memory: tensors, what the C library keeps of them,
    buffers of libraries, stacks of threads. On CUDA it is the most that torch's allocator has reserved, and
    the growth of the rest of the device, such as by NCCL; other processes on the device count too.

    Args:
        device: the device that tensors are on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = self._idle_bytes = self._peak = 0
        if device.type == "cuda":
            self._start = torch.cuda.memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._beside = _beside_allocator(device)
        else:
            # Where that is not allowed, the highest so far counts, which a fork begins anew.
            with contextlib.suppress(OSError):
                _CLEAR_REFS.write_text(_FORGET_PEAK)
            now = _read_status()
            # The C library's free bytes are already held. Using them adds nothing.
            self._start = now["VmData"]
            self._idle_bytes = max(0, now["VmData"] - now["RssAnon"])

    def peak_bytes(self) -> int | None:
        """Peak bytes so far, if polled now and then; ``None`` where they cannot be measured."""
        if self._device.type == "cuda":
            beside = max(0, _beside_allocator(self._device) - self._beside)
            return torch.cuda.max_memory_reserved(self._device) - self._start + beside
        now = _read_status()
        if not (now["VmData"] and now["VmHWM"] and now["RssAnon"]):
            return None
        # The kernel's peak is of all resident memory, of which mapped files, such as libraries, only grow.
        # Untouched memory counts towards a limit too: that at first, and now that of new threads.
        anonymous = max(now["VmHWM"] - now["RssFile"] - now["RssShmem"], now["RssAnon"])
        self._peak = max(self._peak, anonymous + self._idle_bytes - self._start, now["VmData"] - self._start)
        return self._peak


def _beside_allocator(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)  # such as NCCL's buffers


class MemoryTracker:
    """Follows the tensor memory of this process; see :func:`track_memory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0
        self._alive = 0
        self._base = 0
        self._record: CpuMemoryRecord | None = None
        self._is_paused = False

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes since the start or the last :meth:`reset_peak`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        self._fold_record()
        return self._peak

    @property
    def alive_bytes(self) -> int:
        """Live bytes now."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        self._fold_record()
        return self._alive

    def reset_peak(self) -> None:
        """Resets the peak to the memory that is alive now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._fold_record()
        self._peak = self._alive

    def start(self) -> None:
        """Begins; :func:`track_memory` calls it."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._record = CpuMemoryRecord()
        self._record.count(True)
        self._record.start()
        self._base = self._record.stop()[-1]  # the baseline of later counts
        self._record.start()

    def pause(self) -> None:
        """Records no peak until :meth:`resume`, with operators at full speed; allocations still count."""
        if self._record is not None and not self._is_paused:
            self._fold_record()
            self._record.stop()
            self._is_paused = True

    def resume(self) -> None:
        """Records again, with the memory that is alive now as the new peak."""
        if self._record is not None and self._is_paused:
            self._record.start()
            self._is_paused = False
        self.reset_peak()

    def stop(self) -> None:
        """Ends; the figures stay."""
        if self._record is not None:
            self._fold_record()
            record, self._record = self._record, None
            if not self._is_paused:
                record.stop()
            record.count(False)

    def _fold_record(self) -> None:
        if self._record is None or self._is_paused:
            return
        counts = [count - self._base for count in self._record.stop()]
        self._peak = max(self._peak, *counts)
        self._alive = counts[-1]
        self._record.start()


@contextmanager
def track_memory(device: torch.device) -> Iterator[MemoryTracker]:
    """Follows the tensor memory of this process inside the block.

    On CUDA the figures are the allocator's, of the whole process. On the CPU they are of what is allocated
    inside the block, by any thread, in the bytes asked for; memory that was there before is not counted, nor
    its release, so models are to be built or copied inside. Operators run slower meanwhile, and another
    profiler cannot run: time steps outside.

    Example:
        >>> with track_memory(torch.device("cpu")) as memory:  # doctest: +SKIP
        ...     result = build()
        ...     result.train_step(batch)  # makes the optimizer's states
        ...     memory.reset_peak()
        ...     result.train_step(batch)
        ...     peak = PeakMemory(peak_bytes=memory.peak_bytes, states=state_bytes(result))
    """
    tracker = MemoryTracker(device)
    tracker.start()
    try:
        yield tracker
    finally:
        tracker.stop()


@dataclass
class MemoryGrowth:
    """Growth of a process over the steps of a run. Pure; no clock, no files.

    In each doubling of the number of steps a heap fragments by about as much, and caches fill. So growth is
    judged by doublings and not by steps: a doubling that adds less than a hundredth is level.
    """

    _seen: list[tuple[int, int]] = field(default_factory=list)

    def add(self, step: int, num_bytes: int) -> None:
        """Adds the memory after a step; steps count from 1."""
        self._seen.append((step, num_bytes))

    @property
    def num_steps(self) -> int:
        """The last step that was added."""
        return self._seen[-1][0] if self._seen else 0

    @property
    def per_doubling(self) -> int:
        """Bytes that the last doubling of the number of steps added; 0 before there was one."""
        return self._bytes_between(self.num_steps)

    @property
    def is_level(self) -> bool:
        """True if the last doubling added less than a hundredth."""
        return self.num_steps >= _FEWEST and self.per_doubling <= _LEVEL * self._seen[-1][1]

    def until(self, num_steps: int) -> int:
        """Bytes that a run of ``num_steps`` is expected to add, if each doubling adds as much as the last."""
        if not 0 < self.num_steps < num_steps:
            return 0
        return round(self.per_doubling * math.log2(num_steps / self.num_steps))

    @property
    def is_steady(self) -> bool:
        """True if memory grows like a leak: equally at each step, so twice as much in each doubling.

        A factor of 1.5 suffices, since a fragmenting heap adds at most as much as before.
        """
        return (
            self.per_doubling > 0
            and not self.is_level
            and self.per_doubling >= _LEAK * self._bytes_between(self.num_steps // 2)
        )

    @property
    def bytes_per_step(self) -> float:
        """Mean growth of a step over the last doubling."""
        return self.per_doubling / max(1, self.num_steps - self.num_steps // 2)

    def since(self, bytes_per_step: float) -> int:
        """The first step from which this rate explains the added bytes."""
        first, last = self._seen[0], self._seen[-1]
        return max(first[0], round(last[0] - (last[1] - first[1]) / bytes_per_step))

    def _bytes_between(self, step: int) -> int:
        """Bytes that the steps from ``step // 2`` to ``step`` added; 0 where too few were seen."""
        if step < _FEWEST:
            return 0
        last = [size for number, size in self._seen if number <= step]
        before = [size for number, size in self._seen if number <= step // 2]
        return last[-1] - before[-1] if before else 0


class GrowthWatch:
    """Watch on a job's process: looks after updates 4, 8, 16, … of the optimizer and says once that it grows.

    After a look that sees growth another follows, a quarter as many steps later and at least 16. If the
    process has grown further, the watch says so, with the rate and whether Python's tensors hold more. It
    takes that back once the process is level.

    Args:
        device: the device that tensors are on.
        read: bytes that the process holds; ``None`` where that is not known.

    Attributes:
        finding: text of the warning, without a full stop; empty if nothing grows.
    """

    def __init__(
        self, device: torch.device, read: Callable[[torch.device], int | None] = private_bytes
    ) -> None:
        self._device, self._read = device, read
        self._growth = MemoryGrowth()
        self._num_steps = 0
        self._next = _FEWEST // 2  # the step of the next look
        self._suspicion: tuple[int, int, tuple[int, int]] | None = None  # step, bytes, tensors, their bytes
        self.finding = ""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks from now on after the steps of ``optimizer``, whatever loop calls them."""
        with contextlib.suppress(AttributeError):  # those of backends that have no hooks
            optimizer.register_step_post_hook(self.after_step)

    def after_step(self, *_: object) -> None:
        """After an update; takes a microsecond, or some milliseconds if it looks. Never raises."""
        self._num_steps += 1
        if self._num_steps < self._next:
            return
        try:
            self._look_at_process()
        except Exception:
            log.debug("the memory of this process cannot be watched", exc_info=True)
            self._next = sys.maxsize

    def _look_at_process(self) -> None:
        num_bytes = self._read(self._device)
        if num_bytes is None:
            self._next = sys.maxsize  # never look again
            return
        growth = self._growth
        if self._suspicion is not None:  # this look confirms or clears
            step, before, tensors = self._suspicion
            self._suspicion, self._next = None, 2 * growth.num_steps
            increase, num_steps = num_bytes - before, self._num_steps - step
            if increase / num_steps >= growth.bytes_per_step / 2:  # growth goes on
                self.finding = self._describe_growth(increase, num_steps, tensors)
            return
        growth.add(self._num_steps, num_bytes)
        self._next = 2 * self._num_steps
        if self.finding and growth.is_level:
            self.finding = ""
        elif not self.finding and self._num_steps >= _FEWEST_TO_SAY and growth.is_steady:
            self._suspicion = self._num_steps, num_bytes, _live_tensors()
            self._next = self._num_steps + max(_CONFIRMING_STEPS, self._num_steps // 4)

    def _describe_growth(self, increase: int, num_steps: int, before: tuple[int, int]) -> str:
        more, more_bytes = (now - then for now, then in zip(_live_tensors(), before, strict=True))
        bytes_per_step = increase / num_steps
        what = "no tensors are kept in Python: look for caches, logs and connections without a bound"
        if more >= num_steps / 2:
            what = (
                f"{more / num_steps:.0f} more tensors are alive after each: look for losses and outputs that are kept and were "
                "not detached"
            )
        elif more_bytes >= increase / 2:
            what = "tensors of Python hold it: look for lists of outputs, and for tensors that grow"
        return (
            f"the memory of this process grows by {bytes_text(round(bytes_per_step))} a step (measured over "
            f"{num_steps} steps), since about step {self._growth.since(bytes_per_step)}; {what}"
        )


def _live_tensors() -> tuple[int, int]:
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages: dict[int, int] = {}
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # subclasses without memory of their own
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()  # views share a storage
    return len(tensors), sum(storages.values())
