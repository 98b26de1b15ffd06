"""Tensor and pipeline parallelism by torch's own interfaces, as a careful user would write them for a Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from atorch_ns.pipeline import get_schedule
from benchmarks._by_hand import CPU, OPTIM_ARGS, step_by_hand
from benchmarks._llama import Llama, next_token_loss

__all__ = ["pipeline_step", "tensor_step"]

Batch = dict[str, Tensor]


def tensor_step(model: Llama, batch: Batch) -> Callable[[], object]:
    """One training step with every layer divided over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    styles = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for column in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ):
        styles[f"model.layers.*.{column}"] = ColwiseParallel()
    for row in ("self_attn.o_proj", "mlp.down_proj"):
        styles[f"model.layers.*.{row}"] = RowwiseParallel()
    divided = parallelize_module(model.build(), mesh, styles)
    optimizer = torch.optim.AdamW(divided.parameters(), **OPTIM_ARGS)
    return lambda: step_by_hand(divided, optimizer, batch, bf16=False)


class _Stage(nn.Module):
    """A contiguous part of a Llama: hidden states in and out, tokens into the first, logits out of the last."""

    def __init__(self, whole: nn.Module, index: int, count: int) -> None:
        super().__init__()
        base: Any = whole.get_submodule("model")
        share = len(base.layers) // count
        base.layers = nn.ModuleList(list(base.layers)[index * share : (index + 1) * share])
        base.config.num_hidden_layers = share
        self.first, self.last = index == 0, index == count - 1
        if not self.first:
            base.embed_tokens = None
        if not self.last:
            base.norm = nn.Identity()
        self.base = base
        self.head = whole.get_submodule("lm_head") if self.last else None

    def forward(self, given: Tensor) -> Tensor:
        named = {"input_ids": given} if self.first else {"inputs_embeds": given}
        hidden: Tensor = self.base(**named, use_cache=False).last_hidden_state
        return hidden if self.head is None else self.head(hidden)


def pipeline_step(
    model: Llama, batch: Batch, num_micro_batches: int, schedule_name: str = "1F1B"
) -> Callable[[], object]:
    """One training step under torch's schedule of a name, with the number of stages on a rank that ours has by default."""
    info, rank, num_ranks = get_schedule(schedule_name), dist.get_rank(), dist.get_world_size()
    own, count = info.stages_of(rank, num_ranks), num_ranks * info.usual_stages
    modules = nn.ModuleList(_Stage(model.build(), stage, count) for stage in own)
    optimizer = torch.optim.AdamW(
        modules.parameters(), **OPTIM_ARGS, fused=True
    )  # as ours: the schedules are compared
    stages = [PipelineStage(module, stage, count, CPU) for stage, module in zip(own, modules, strict=True)]
    kind: Any = get_schedule_class(schedule_name)
    given_stages = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    schedule = kind(given_stages, num_micro_batches, loss_fn=_loss_of_logits)
    tokens = batch["input_ids"]
    given = (tokens,) if 0 in own else ()
    wanted: dict[str, Any] = {"target": tokens, "losses": []} if count - 1 in own else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*given, **wanted, return_outputs=False)
        optimizer.step()
        if wanted:
            wanted["losses"].clear()

    return step


class _Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def _loss_of_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    return next_token_loss({"input_ids": tokens}, _Output(logits))
