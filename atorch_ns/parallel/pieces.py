"""Pieces: a rank's parts of whole tensors, written as plain tensors with places, and taken from wholes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from atorch_ns.errors import CheckpointError
from atorch_ns.job import Job
from atorch_ns.job.materialise import divided_like
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.text import first_few
from atorch_ns.torch_compat import laid_out, local_box, plain_name

PIECES: Final = "_parallel_pieces"
"""The state dict entry with the places of its tensors in their wholes."""


class PieceLocation(NamedTuple):
    """Location of a piece in its whole: the whole's shape, and the piece's offset in each dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass
class Pieces:
    """Description of itself in a rank's state dict.

    Attributes:
        rank, config: the rank, and the config of its modules.
        order: all parameters of the whole module, first names, in its order.
        names: the names of its state dict, in order.
        places: by name, the locations of tensors that are not whole.
    """

    rank: int
    config: Mapping[str, Any]
    order: Sequence[str]
    names: Sequence[str] = ()
    places: dict[str, PieceLocation] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ComputeConfig, job: Job, names: Sequence[str] = ()) -> Pieces:
        """Describes a parallel module. Places are added as tensors are written."""
        return cls(job.cluster.rank, config.as_json(), list(job.original.parameter_order), names)

    def as_state(self) -> dict[str, Any]:
        """Plain objects, which any file reader can load."""
        places = {name: [list(region.shape), list(region.offset)] for name, region in self.places.items()}
        return {
            "rank": self.rank,
            "config": dict(self.config),
            "order": list(self.order),
            "names": list(self.names),
            "places": places,
        }


def localise(name: str, value: Any, pieces: Pieces) -> Any:
    """This rank's part of a tensor, with its place recorded. Other values unchanged."""
    if not isinstance(value, DTensor):
        return value
    offset, _ = local_box(value)  # of this rank's part
    pieces.places[name] = PieceLocation(tuple(value.shape), offset)
    return value.to_local()


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, with the placement of ``like``."""
    return divided_like(whole.to(like.device), like) if isinstance(like, DTensor) else whole


def as_part(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A plain part in the form of ``like``."""
    return laid_out(local.to(like.device).contiguous(), like) if isinstance(like, DTensor) else local


def load_pieces(
    module_state: Mapping[str, Any],
    state: MutableMapping[str, Any],
    prefix: str,
    start: str,
    *,
    metadata: Mapping[str, Any] | None,
) -> None:
    """Replaces the entries of a state dict by those of the inner module.

    Args:
        module_state: the state dict of the inner module, with tensors as held.
        state: names with ``prefix`` are the plain module's; afterwards they begin with ``start``.
        metadata: description in a rank's state dict; ``None`` for a whole one.

    Raises:
        CheckpointError: if this rank holds different pieces.
    """
    odd = []
    for name, value in module_state.items():
        plain = plain_name(name)
        if prefix + plain not in state:
            if metadata is not None:
                odd.append(plain)
            continue
        entry = state.pop(prefix + plain)
        if not isinstance(value, torch.Tensor) or not isinstance(entry, torch.Tensor):
            state[start + name] = entry
            continue
        if metadata is None:
            fits = entry.shape == value.shape  # load_state_dict reports other shapes
            state[start + name] = part_of(entry, value) if fits else entry
            continue
        region = metadata["places"].get(plain)
        box = [list(value.shape), list(local_box(value)[0])] if isinstance(value, DTensor) else None
        if region != box or entry.shape != local_part(value).shape:
            odd.append(plain)
        state[start + name] = as_part(entry, value)
    if odd:
        raise CheckpointError(
            f"the state dict is from rank {metadata['rank'] if metadata else 0} of another plan: {first_few(odd, 4)} are missing, or "
            "are different pieces. Merge the state dicts of all ranks with merge_state_dicts, and load that with load_merged_state_dict."
        )


def assemble(name: str, parts: Sequence[tuple[int, torch.Tensor, PieceLocation | None]]) -> torch.Tensor:
    """Assembles a whole from parts on ranks: ``(rank, part, place)``, without a place for a whole.

    Raises:
        ValueError: if two ranks hold different values of the same elements, or some elements are on none.
    """
    _, first, region = parts[0]
    if region is None:  # every rank holds the whole
        for rank, other, _ in parts[1:]:
            if other.shape != first.shape or not torch.allclose(
                other.to(first.device), first, rtol=0, atol=0, equal_nan=True
            ):
                raise ValueError(
                    f"Conflict in merging {name}: ranks {parts[0][0]} and {rank} hold different values."
                )
        return first
    # Parts are laid into the whole; where ranks hold copies of a part these must be equal.
    whole = first.new_zeros(region.shape)
    coverage = torch.zeros(region.shape, dtype=torch.bool, device=first.device)  # elements that are there
    for rank, part, where in parts:
        if where is None or where.shape != region.shape:
            raise ValueError(f"Conflict in merging {name}: rank {rank} holds a piece of a different tensor.")
        box = tuple(slice(start, start + size) for start, size in zip(where.offset, part.shape, strict=True))
        there, overlap = whole[box], coverage[box]
        mine = part.to(first.device)
        if bool((overlap & (there != mine) & ~(there.isnan() & mine.isnan())).any()):  # NaN equals NaN
            raise ValueError(
                f"Conflict in merging {name}: rank {rank} holds different values than the ranks before it."
            )
        whole[box], coverage[box] = mine, True
    if not bool(coverage.all()):
        raise ValueError(f"Pieces of {name} are missing: give the state dicts of all ranks of a scale unit.")
    return whole


def broadcast_in_strides(tensors: Sequence[torch.Tensor], stride: int) -> None:
    """Gives each tensor its value on the rank ``rank % stride``. Collective over all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if stride >= size or not tensors:
        return
    local_group: Any = None
    for first in range(stride):
        group = dist.new_group(list(range(first, size, stride)))  # every rank makes all groups, in one order
        local_group = group if rank % stride == first else local_group
    for tensor in tensors:
        local = local_part(tensor)
        buffer = local.detach().contiguous()  # a part may be a view
        dist.broadcast(buffer, src=rank % stride, group=local_group)
        with torch.no_grad():
            local.copy_(buffer)
    dist.destroy_process_group(local_group)
