"""The same features of torch as a strategy stands for, called by hand, as a careful user would write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks._llama import next_token_loss

__all__ = ["CPU", "OPTIM_ARGS", "SCENARIOS", "Recomputed", "Scenario", "step_by_hand"]

CPU = torch.device("cpu")
OPTIM_ARGS: dict[str, Any] = {"lr": 1e-4}
"""Of AdamW, on both sides."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A strategy and its counterpart by hand.

    Attributes:
        name: in tables.
        strategy: as ``load_strategy``.
        by_hand: wraps a plain model; collective where there are several ranks.
        num_ranks: processes; 1 for a plain script without a process group.
        bf16: whether forward pass and loss run under autocast.
        batch_size: of one rank.
        fused: whether AdamW by hand is fused, as it is by the strategy: nothing else differs then but what is looked at.
    """

    name: str
    strategy: Sequence[Any]
    by_hand: Callable[[nn.Module], nn.Module]
    num_ranks: int = 2
    bf16: bool = False
    batch_size: int = 2
    fused: bool | None = None


def step_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], *, bf16: bool
) -> None:
    """One training step of a wrapped model."""
    optimizer.zero_grad()
    data = {key: value.to(CPU) for key, value in batch.items()}
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        loss = next_token_loss(data, model(**data))
    loss.backward()
    optimizer.step()


def _plain(model: nn.Module) -> nn.Module:
    return model


def _replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _sharded(model: nn.Module, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    given: dict[str, Any] = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    for block in _blocks(model):
        fully_shard(block, **given)
    fully_shard(model, **given)
    return model


def _sharded_recomputed(model: nn.Module) -> nn.Module:
    return _sharded(_recomputed(model))


def _sharded_recomputed_bf16(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _sharded(_recomputed(model), policy)


def _blocks(model: nn.Module) -> nn.ModuleList:
    found = model.get_submodule("model.layers")
    assert isinstance(found, nn.ModuleList)
    return found


def _recomputed(model: nn.Module) -> nn.Module:
    blocks = _blocks(model)
    for position, block in enumerate(blocks):
        blocks[position] = Recomputed(block)
    return model


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


BF16 = ("amp_native", "bf16")

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="fp32, 1 process", strategy=[], by_hand=_plain, num_ranks=1),
    Scenario(
        name="bf16 autocast, 1 process", strategy=[BF16], by_hand=_plain, num_ranks=1, bf16=True, batch_size=4
    ),
    Scenario(name="DDP", strategy=["ddp"], by_hand=_replicated),
    Scenario(
        name="DDP, buckets of our own, AdamW by hand fused too",
        strategy=[("ddp", {"reducer": "own"})],
        by_hand=_replicated,
        fused=True,
    ),
    Scenario(name="DDP, bf16 autocast", strategy=["ddp", BF16], by_hand=_replicated, bf16=True, batch_size=4),
    Scenario(name="FSDP2", strategy=["fsdp"], by_hand=_sharded),
    Scenario(name="FSDP2, checkpoint", strategy=["fsdp", "checkpoint"], by_hand=_sharded_recomputed),
    Scenario(
        name="FSDP2, checkpoint, bf16 autocast",
        strategy=["fsdp", "checkpoint", BF16],
        by_hand=_sharded_recomputed_bf16,
        bf16=True,
        batch_size=4,
    ),
)
