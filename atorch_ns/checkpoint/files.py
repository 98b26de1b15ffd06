"""Files of a checkpoint: sizes and digests, recorded after writing and checked before reading."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from atorch_ns.checkpoint.folder import DamagedError, other_steps
from atorch_ns.checkpoint.manifest import FileRecord, Manifest
from atorch_ns.checkpoint.tensors import INDEX, stored_sizes
from atorch_ns.errors import CheckpointError
from atorch_ns.text import first_few

_CHUNK_BYTES: Final = 4 * 1024**2  # read at a time
_SHOWN: Final = 4


def record_files(folder: Path, rank: int) -> dict[str, FileRecord]:
    """Size and digest of each file that ``rank`` has written into ``folder``; reads them once.

    Raises:
        CheckpointError: if one cannot be read.
    """
    # torch names the files of a rank so; rank 0 writes the index too.
    paths = [*folder.glob(f"__{rank}_*.distcp"), *([folder / INDEX] if rank == 0 else [])]
    try:
        return {path.name: record_of(path) for path in sorted(paths)}
    except OSError as error:
        raise CheckpointError(
            f"the data written to {folder} cannot be read back ({error}), so it did not become a checkpoint."
        ) from error


def check_files(folder: Path, records: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    """Reads the named files and compares them with their records. A file without a record is not read.

    Raises:
        CheckpointError: naming each file that differs, with the sizes and digests expected and found.
    """
    recorded_names = [name for name in names if name in records]
    check_sizes(folder, {name: records[name].size for name in recorded_names})
    problems = []
    for name in recorded_names:
        original = records[name]
        try:
            record = record_of(folder / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error}")
            continue
        if record != original:
            problems.append(
                f"{name} has {record.size} bytes with CRC-32 {record.crc32}, and {original.size} bytes with CRC-32 "
                f"{original.crc32} were written"
            )
    _raise_damaged(folder, problems)


def check_sizes(folder: Path, sizes: Mapping[str, int], *, at_least: bool = False) -> None:
    """Compares the sizes of files, in bytes, without reading them.

    Args:
        folder: folder of the files.
        sizes: expected sizes by file name.
        at_least: whether larger files are accepted.

    Raises:
        CheckpointError: naming each file that is missing or of another size.
    """
    problems = []
    least = "at least " if at_least else ""
    for name, saved_size in sizes.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            problems.append(f"{name} of {least}{saved_size} bytes cannot be opened: {error.strerror}")
            continue
        if size < saved_size or (size > saved_size and not at_least):
            problems.append(f"{name} has {size} bytes, and {least}{saved_size} were written")
    _raise_damaged(folder, problems)


def share_of(rank: int, requests: Sequence[tuple[str, Mapping[str, int]]]) -> list[str]:
    """The files that a rank checks: the ranks of a machine divide the files that any of them needs.

    Args:
        rank: the rank whose share is wanted.
        requests: machine name and sizes of the files to read, for each rank.
    """
    host = requests[rank][0]
    peers = [peer for peer, (other, _) in enumerate(requests) if other == host]  # of one machine
    sizes = {name: size for peer in peers for name, size in requests[peer][1].items()}
    load = dict.fromkeys(peers, 0)
    share = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):  # the largest to the least loaded
        least_loaded = min(peers, key=lambda peer: (load[peer], peer))
        load[least_loaded] += sizes[name]
        if least_loaded == rank:
            share.append(name)
    return share


def alternative(folder: Path) -> str:
    """A sentence that names the checkpoint to load in place of a damaged one."""
    for path in other_steps(folder):
        if _is_whole(path):
            return (
                f"The newest other step whose files are all there in full is {path}: "
                f"checkpoint.load({str(path)!r}, result) checks and loads it."
            )
    return (
        f"There is no other whole step in {folder.parent}: copy the damaged files again from where they came."
    )


def _is_whole(folder: Path) -> bool:
    try:
        records = Manifest.read(folder).files
        if records is None:
            check_sizes(folder, stored_sizes(folder), at_least=True)
        else:
            check_files(folder, records, [INDEX])  # which says where tensors are
            check_sizes(folder, {name: record.size for name, record in records.items()})
    except CheckpointError:
        return False
    return True


def record_of(path: Path) -> FileRecord:
    """Size and digest of a file."""
    size, digest, chunk = 0, 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            # A CRC finds accidents, and is faster than disks; it is not a protection against forgery.
            digest = zlib.crc32(chunk[:count], digest)
            size += count
    return FileRecord(size=size, crc32=f"{digest:08x}")


def _raise_damaged(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        raise DamagedError(f"{folder} is damaged: {first_few(problems, _SHOWN, '; ')}.")
