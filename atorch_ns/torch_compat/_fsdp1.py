"""FSDP1's flat parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn
    from torch.distributed.fsdp import ShardingStrategy

__all__ = ["FlatPart", "fsdp1_parts", "hybrid_shard_zero2"]


def hybrid_shard_zero2() -> ShardingStrategy:
    """FSDP1's strategy that replicates over one group, shards over another and keeps parameters gathered."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy._HYBRID_SHARD_ZERO2


class FlatPart(NamedTuple):
    """One parameter inside a flat parameter of FSDP1.

    Attributes:
        module: the module that holds it.
        name: its name there.
        shape: of the whole.
        parameter: what the optimizer updates: the original parameter, or with ``use_orig_params=False`` the
            flat one.
        is_flat: whether that is the flat one.
        shard: this rank's part of the flat parameter, one-dimensional, live.
        offset: where this rank's part of the parameter begins in the shard; ``None`` if it has none.
        start: where it begins in the flattened parameter.
        length: its elements.
    """

    module: nn.Module
    name: str
    shape: torch.Size
    parameter: nn.Parameter
    is_flat: bool
    shard: torch.Tensor
    offset: int | None
    start: int
    length: int


def fsdp1_parts(root: nn.Module) -> Iterator[FlatPart]:
    """What is in the flat parameters of all ``FullyShardedDataParallel`` modules of ``root``."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for wrapper in FullyShardedDataParallel.fsdp_modules(root):
        if wrapper._handle is None:
            continue
        flat: Any = wrapper._handle.flat_param
        local = getattr(
            flat, "_local_shard", None
        )  # set when training begins; until then it is `flat` itself
        shard = flat.detach() if local is None else local.detach()
        originals = flat._params
        for place, info in enumerate(flat._shard_param_infos):
            yield FlatPart(
                module=flat._param_infos[place].module,
                name=flat._param_infos[place].param_name,
                shape=flat._shapes[place],
                parameter=flat if originals is None else originals[place],
                is_flat=originals is None,
                shard=shard,
                offset=info.offset_in_shard if info.in_shard else None,
                start=info.intra_param_start_idx or 0,
                length=info.numel_in_shard or 0,
            )
