"""Reading parts of stored tensors that cannot be sliced as they are stored."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

__all__ = ["WholeChunks"]


class WholeChunks(DefaultLoadPlanner):
    """Reads stored chunks whole into plain tensors, of which it takes the part that is wanted.

    torch slices what it has read from a file. Tensors in 8 or 4 bits with a scale for each block, such as
    torchao's, can be sliced along the first dim alone, and there between blocks. A copy of them into a plain
    tensor is exact, and can be sliced anywhere; it takes the memory of one chunk.

    Args:
        names: the tensors to read so; others are read as torch does.
    """

    def __init__(self, names: Container[str]) -> None:
        super().__init__()
        self._names = names
        self._wanted: dict[ReadItem, ReadItem] = {}

    def create_local_plan(self) -> LoadPlan:
        """That of torch, with whole chunks in the place of parts."""
        plan = super().create_local_plan()
        return replace(plan, items=[self._widened(item) for item in plan.items])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where torch puts what it has read."""
        wanted = self._wanted.get(read_item)
        target: torch.Tensor = super().resolve_tensor(read_item if wanted is None else wanted)
        return target if wanted is None else target.new_empty(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Takes the part that is wanted."""
        wanted = self._wanted.get(read_item)
        if wanted is None:
            return
        for dim, (offset, length) in enumerate(zip(wanted.storage_offsets, wanted.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        super().resolve_tensor(wanted).detach().copy_(tensor)

    def _widened(self, item: ReadItem) -> ReadItem:
        if item.type is not LoadItemType.TENSOR or item.dest_index.fqn not in self._names:
            return item
        sizes = self._chunk_sizes(item.storage_index)
        if item.lengths == sizes:
            return item
        whole = replace(item, storage_offsets=torch.Size([0] * len(sizes)), lengths=sizes)
        self._wanted[whole] = item
        return whole

    def _chunk_sizes(self, index: MetadataIndex) -> torch.Size:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        return next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
