"""Memory limit of a process, and out-of-memory detection."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import numbers
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from atorch_ns.cluster.process_memory import data_bytes, unused_bytes
from atorch_ns.errors import BackendError, InputError, RankError
from atorch_ns.system import table_rows
from atorch_ns.text import bytes_text

if sys.platform != "win32":
    import resource

_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
_IS_MMAPPED: Final = 2  # of glibc's malloc.c: flag, in the word before an allocation, of one outside the heap
_OUT_OF_MEMORY: Final = "out of memory:"  # begins errors of this module, to which a limit around adds nothing
_MOST: Final = 2**50  # bytes beyond which a limit limits nothing, and C's integers end
STACK_BYTES: Final = 2 * 2**20
"""Stack of a thread that starts under a limit. It counts whole, though threads write some ten KiB of it;
glibc's default is 8 MiB, macOS's 512 KiB."""
_ATTRIBUTES_BYTES: Final = 64  # at least the size of glibc's pthread_attr_t, which has 56 on 64 bits
_LARGE: Final = 64 * 2**10  # bytes from which on a freed allocation is returned to the system


@contextmanager
def limit_memory(num_bytes: int, device: torch.device, *, held_bytes: int = 0) -> Iterator[None]:
    """Lets this process allocate ``num_bytes`` more than it holds when the block begins, and no more.

    On CUDA torch's allocator has the limit. On the CPU (Linux) the system enforces it on all private memory:
    tensors, buffers of libraries, and 2 MiB for the stack of every thread that starts. A search counts the
    same under ``memory_limit_gib``. So start the process group and load the data first, and build the model
    inside. The C library goes on returning freed tensors to the system after the block.

    Args:
        device: the device that tensors are on.
        held_bytes: bytes of the limit that are taken already.

    Example:
        >>> with limit_memory(200 * 2**20, torch.device("cpu")):  # doctest: +SKIP
        ...     _, result, _ = auto_accelerate(build(), ..., load_strategy="strategy.json")
        ...     train(result)

    Raises:
        MemoryError: in place of the allocator's error, with the bytes in use, the limit and the request.
        BackendError: if this system enforces no limit.
    """
    is_number = isinstance(num_bytes, numbers.Real) and not isinstance(num_bytes, bool)
    if not is_number or not 1 <= num_bytes < math.inf:
        raise InputError(f"num_bytes={num_bytes!r}: a memory limit must be a positive number of bytes.")
    device = torch.device(device)
    around = room_bytes(device)
    num_bytes = min(int(num_bytes), _MOST if around is None else around + held_bytes)
    if held_bytes >= num_bytes:
        raise MemoryError(
            f"{_OUT_OF_MEMORY} {bytes_text(held_bytes)} are in use before training starts, but the limit is "
            f"{bytes_text(num_bytes)}. Raise the limit."
        )
    gc.collect()  # tensors in cycles would be held now, and freed at some step of the block
    before = _bytes_in_use(device) - held_bytes  # the limit counts from here
    try:
        with (
            _filled_holes(device),
            _small_stacks(device),
            _enforce_limit(before + num_bytes, num_bytes - held_bytes, device),
        ):
            yield
    except Exception as error:
        others = isinstance(error, RankError)  # they describe their own memory
        if others or not is_out_of_memory(error, is_limited=True) or str(error).startswith(_OUT_OF_MEMORY):
            raise
        in_use = max(0, _bytes_in_use(device) - before)  # the error's traceback keeps what was alive
        raise MemoryError(
            f"{_OUT_OF_MEMORY} {bytes_text(in_use)} of the limit of {bytes_text(num_bytes)} were in use when "
            f"{_asked_for(error)} were requested. Use a strategy that needs less, or raise the limit."
        ) from error


@contextmanager
def _enforce_limit(total: int, num_bytes: int, device: torch.device) -> Iterator[None]:
    """Enforces a limit of ``total`` bytes, of which ``num_bytes`` are new."""
    if device.type == "cuda":
        device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        share = total / torch.cuda.get_device_properties(device).total_memory  # torch takes a share of it
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    # An existing limit, from an enclosing block or the system, stays in force.
    stricter = [there for there in before if there != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([total, *stricter]), before[1]))
    try:
        if not _is_enforced(num_bytes):
            raise BackendError(
                f"a limit of {bytes_text(num_bytes)} cannot be enforced here: the system ignores RLIMIT_DATA."
            )
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _is_enforced(num_bytes: int) -> bool:
    try:  # an untouched mapping takes no memory
        mmap.mmap(-1, num_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False


@contextmanager
def lowered_limit(num_bytes: int, device: torch.device) -> Iterator[None]:
    """Takes ``num_bytes`` off the limit of the :func:`limit_memory` block around this one; on CPUs only."""
    if room_bytes(device) is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (max(0, before[0] - num_bytes), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def room_bytes(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on CPUs under ``RLIMIT_DATA``; ``None`` without a limit."""
    if device.type == "cuda" or sys.platform == "win32":
        return None
    limit, usage = resource.getrlimit(resource.RLIMIT_DATA)[0], data_bytes()
    return None if limit == resource.RLIM_INFINITY or usage is None else max(0, limit - usage)


def return_freed_memory() -> None:
    """Makes glibc return freed tensors to the system at once from now on. No effect with other C libraries.

    Otherwise glibc keeps much of this memory, and a process takes up to 50% more than its tensors need.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)  # larger blocks are mapped, and unmapped when freed
        library.malloc_trim(0)  # return what is free already


@contextmanager
def _filled_holes(device: torch.device) -> Iterator[None]:
    library: Any = ctypes.CDLL(None) if device.type == "cpu" else None  # Windows, with CUDA, has none
    holes: list[int] = []
    # A hole of the heap counts as private memory already: tensors in it would come on top of the limit.
    if hasattr(library, "mallinfo2"):
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
        free_bytes, word = unused_bytes(), ctypes.sizeof(ctypes.c_size_t)
        size = 1 << free_bytes.bit_length()  # sizes halve from above all free bytes down to _LARGE
        while size >= _LARGE and free_bytes > 0:
            pointer = library.malloc(size)
            header = ctypes.c_size_t.from_address(pointer - word).value if pointer else _IS_MMAPPED
            if not header & _IS_MMAPPED:
                holes.append(pointer)  # not written to, so it takes no memory
                free_bytes -= size
            else:  # fresh memory, or none: no hole is that large
                library.free(pointer)
                size //= 2
    try:
        yield
    finally:
        for pointer in holes:
            library.free(pointer)


@contextmanager
def _small_stacks(device: torch.device) -> Iterator[None]:
    library: Any = ctypes.CDLL(None) if device.type == "cpu" else None
    before = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    small = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    is_known = hasattr(library, "pthread_setattr_default_np")  # glibc only
    if is_known:
        for attributes in (before, small):
            library.pthread_getattr_default_np(attributes)
        library.pthread_attr_setstacksize(small, ctypes.c_size_t(STACK_BYTES))
        library.pthread_setattr_default_np(small)
    try:
        yield
    finally:
        if is_known:
            library.pthread_setattr_default_np(before)


def require_room_for_threads(num_threads: int, device: torch.device, *, what: str) -> None:
    """Checks that threads can start under the limit of a block around this one.

    Libraries in C++ may hang, or end the process, where a thread cannot start.

    Raises:
        MemoryError: if their stacks have no room.
    """
    room = room_bytes(device)
    if room is not None and room < num_threads * STACK_BYTES:
        raise MemoryError(
            f"{_OUT_OF_MEMORY} {bytes_text(room)} of the limit are left, but {what} start {num_threads} threads with stacks of "
            f"{bytes_text(STACK_BYTES)} each. Use a strategy that needs less, or raise the limit."
        )


def _bytes_in_use(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cached blocks would count as used
        return torch.cuda.memory_reserved(device)
    return_freed_memory()  # blocks that glibc keeps would count, too
    num_bytes = data_bytes()
    if num_bytes is None:
        raise BackendError(
            f"a memory limit cannot be enforced on {sys.platform}: use Linux or a CUDA device."
        )
    return num_bytes


def _asked_for(error: BaseException) -> str:
    """The requested size in an allocator's message, such as ``"20.0 MiB more"``."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    if match is None:
        return "more"
    number, unit = match[1].split()
    return (bytes_text(int(number)) if unit == "bytes" else match[1]) + " more"


_TEXTS: Final = re.compile(
    "|".join(row["text"] for row in table_rows(Path(__file__).with_name("out_of_memory.csv")))
)
_NOT_MEMORY: Final = re.compile(r"out of resource: shared memory")
"""A Triton kernel that asks for more of a multiprocessor than there is: a smaller batch does not help."""


# A thread's stack; oneDNN.
_UNDER_A_LIMIT: Final = re.compile("Resource temporarily unavailable|could not create a primitive")


def is_out_of_memory(error: BaseException, *, is_limited: bool = False) -> bool:
    """True if an exception, or one of its causes, says that the device's or the host's memory is full.

    torch has a class for its own allocator's failures only; those of libraries are RuntimeErrors known by
    their text. cuBLAS's error about its handle (``CUBLAS_STATUS_NOT_INITIALIZED``) has other causes too and
    does not count. Under a limit (``is_limited``) some errors count that have other causes elsewhere.
    """
    ids: set[int] = set()  # guards against a cycle of causes
    current: BaseException | None = error
    while current is not None and id(current) not in ids:
        ids.add(id(current))
        if isinstance(current, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(current, (RuntimeError, OSError)):
            text = str(current)
            if _TEXTS.search(text) and not _NOT_MEMORY.search(text):
                return True
            if is_limited and _UNDER_A_LIMIT.search(text):
                return True
        current = current.__cause__
    return False
