"""Saving and resharding tensors of a checkpoint folder, through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atorch_ns.checkpoint.folder import DamagedError
from atorch_ns.errors import CheckpointError
from atorch_ns.job import StateSpec
from atorch_ns.text import error_text, first_few


class WholeChunks(DefaultLoadPlanner):
    """Reads stored chunks whole into plain tensors, of which it takes the part that is wanted.

    torch slices what it has read from a file. Tensors in 8 or 4 bits with a scale for each block, such as
    torchao's, can be sliced along the first dim alone, and there between blocks. A copy of them into a plain
    tensor is exact, and can be sliced anywhere; it takes the memory of one chunk.

    Args:
        names: keys of the tensors to read whole; others are read as torch does.
    """

    def __init__(self, names: Container[str]) -> None:
        super().__init__()
        self._names = names
        self._parts: dict[ReadItem, ReadItem] = {}  # by the item that reads the whole chunk

    def create_local_plan(self) -> LoadPlan:
        """torch's plan, with whole chunks in place of parts."""
        plan = super().create_local_plan()
        return replace(plan, items=[self._widen_item(item) for item in plan.items])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor that torch reads into."""
        part = self._parts.get(read_item)
        target: torch.Tensor = super().resolve_tensor(read_item if part is None else part)
        return target if part is None else target.new_empty(read_item.lengths)  # room for the whole chunk

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copies the wanted part of a chunk."""
        part = self._parts.get(read_item)
        if part is None:
            return
        for dim, (offset, length) in enumerate(zip(part.storage_offsets, part.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        super().resolve_tensor(part).detach().copy_(tensor)

    def _widen_item(self, item: ReadItem) -> ReadItem:
        if item.type is not LoadItemType.TENSOR or item.dest_index.fqn not in self._names:
            return item
        sizes = self._chunk_sizes(item.storage_index)
        if item.lengths == sizes:
            return item  # whole already
        whole = replace(item, storage_offsets=torch.Size([0] * len(sizes)), lengths=sizes)
        self._parts[whole] = item
        return whole

    def _chunk_sizes(self, index: MetadataIndex) -> torch.Size:
        assert self.metadata is not None
        entry = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)


INDEX: Final = ".metadata"
"""torch's index of the tensors in the files."""


def write_tensors(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, distributed: bool, group: dist.ProcessGroup | None
) -> None:
    """Writes every rank's tensors; replicated ones are written once. Collective.

    Args:
        tensors: this rank's tensors by key.
        folder: an empty folder, the same for all ranks.
        distributed: whether there is a process group.
        group: a group of all ranks; ``None`` for the default group.

    Raises:
        CheckpointError: on every rank, with the reason of each that failed.
    """
    try:
        if distributed:
            save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=group)
        else:
            _write_alone(tensors, FileSystemWriter(folder))
    except CheckpointException as error:
        raise CheckpointError(f"the checkpoint was not written: {_failure_reasons(error)}") from error
    except (OSError, RuntimeError) as error:  # a full disk; a rank that has ended
        raise CheckpointError(f"the checkpoint was not written: {error_text(error)}") from error


def describe_tensors(folder: Path) -> dict[str, StateSpec]:
    """Shape and dtype of everything in ``folder``.

    torch keeps them in ``.metadata``, a pickle, which can execute code: load only checkpoints that you trust.

    Raises:
        CheckpointError: if it cannot be read.
    """
    return {
        key: StateSpec(tuple(entry.size), entry.properties.dtype)
        for key, entry in _read_index(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def stored_sizes(folder: Path) -> dict[str, int]:
    """The least size in bytes of every file of tensors.

    Raises:
        CheckpointError: if torch's index cannot be read.
    """
    metadata = _read_index(folder)
    return _file_sizes(metadata, metadata.storage_data or {})


def files_read(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, whole_chunks: Container[str] = ()
) -> dict[str, int]:
    """The least size in bytes of every file from which :func:`read_tensors` will fill ``tensors``.

    Raises:
        CheckpointError: if the folder does not have these tensors.
    """
    metadata, planner = _read_index(folder), WholeChunks(whole_chunks)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
    try:
        items = planner.create_local_plan().items
        return _file_sizes(metadata, [item.storage_index for item in items])
    except (KeyError, RuntimeError, ValueError) as error:
        raise DamagedError(f"{folder / INDEX} does not belong to this checkpoint: {error}.") from error


def read_tensors(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, distributed: bool, whole_chunks: Container[str] = ()
) -> None:
    """Fills ``tensors`` in place, however they were sharded when written. Collective.

    Args:
        tensors: this rank's tensors by key.
        folder: the checkpoint, the same for all ranks.
        distributed: whether there is a process group.
        whole_chunks: keys of tensors that may be stored in a form that cannot be sliced.

    Raises:
        CheckpointError: on every rank, with the reason of each that failed.
    """
    try:
        with warnings.catch_warnings():
            # It warns that there is no process group, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(
                dict(tensors),
                storage_reader=FileSystemReader(folder),
                planner=WholeChunks(whole_chunks),
                no_dist=not distributed,
            )
    except CheckpointException as error:
        raise CheckpointError(f"{folder} was not read: {_failure_reasons(error)}") from error


def _read_index(folder: Path) -> Metadata:
    try:
        metadata: Metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # damaged pickles raise nearly anything
        raise DamagedError(f"{folder / INDEX} is missing or damaged: {error_text(error)}.") from error
    return metadata


def _file_sizes(metadata: Metadata, indices: Iterable[MetadataIndex]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for index in indices:
        chunk = metadata.storage_data[index]
        sizes[chunk.relative_path] = max(sizes.get(chunk.relative_path, 0), chunk.offset + chunk.length)
    return sizes


def _write_alone(tensors: Mapping[str, torch.Tensor], writer: FileSystemWriter) -> None:
    # torch's save in one process warns, and warnings cannot be filtered in a background thread.
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def _failure_reasons(error: CheckpointException) -> str:
    reasons = [f"rank {rank}: {error_text(cause)}" for rank, (cause, _) in error.failures.items()]
    return first_few(reasons, 4, "; ")
