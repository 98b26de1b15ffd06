"""Plain torch, as a careful user would write it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks._by_hand import SCENARIOS
from benchmarks._llama import Llama, next_token_loss
from benchmarks._peers._peer import AUTOMATIC, OPTIM_ARGS, Peer, Task, Trainer, batch_of

__all__ = ["TORCH"]


def _start(task: Task, size: Llama, num_tokens: int, rank: int) -> Callable[[], Trainer]:
    model, batch = size.build(), batch_of(task, size, num_tokens, rank)

    def build() -> Trainer:
        wrapped = _wrapped(task, model)
        optimizer = _optimizer(task, wrapped)

        def step() -> float:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if task.bf16 else nullcontext():
                loss = next_token_loss(batch, wrapped(**batch))
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return Trainer(step=step)

    return build


def _wrapped(task: Task, model: nn.Module) -> nn.Module:
    if task.shards == "gradients":
        return _gathered_between_passes(model)
    name = "DDP" if task.shards == "optimizer" else task.name
    return next(one for one in SCENARIOS if one.name == name).by_hand(model)


def _gathered_between_passes(model: nn.Module) -> nn.Module:
    """ZeRO 2: gradients and optimizer states are sharded; parameters stay whole from forward to backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    blocks = model.get_submodule("model.layers")
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def _optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    if task.shards == "optimizer":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **OPTIM_ARGS)
    return torch.optim.AdamW(model.parameters(), **OPTIM_ARGS)


TORCH = Peer(name="torch by hand", start=_start, lacks={AUTOMATIC.name: "it searches for none"})
