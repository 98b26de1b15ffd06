"""Hugging Face Accelerate: ``Accelerator.prepare`` and its plug-in for FSDP 2."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._llama import Llama, next_token_loss
from benchmarks._peers._peer import AUTOMATIC, OPTIM_ARGS, Peer, Task, Trainer, batch_of

__all__ = ["ACCELERATE"]


def _start(task: Task, size: Llama, num_tokens: int, rank: int) -> Callable[[], Trainer]:
    model, batch = size.build(), batch_of(task, size, num_tokens, rank)

    def build() -> Trainer:
        accelerator = _accelerator(task)
        optimizer: Any = torch.optim.AdamW(model.parameters(), **OPTIM_ARGS)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        if task.shards != "nothing" and not hasattr(wrapped, "set_reshard_after_backward"):
            raise RuntimeError(
                f"it shards on accelerators only: on CPUs it left the model a {type(wrapped).__name__}"
            )

        def step() -> float:
            optimizer.zero_grad()
            loss = next_token_loss(batch, wrapped(**batch))
            accelerator.backward(loss)
            optimizer.step()
            return float(loss.detach())

        return Trainer(step=step)

    return build


def _accelerator(task: Task) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-untyped]

    precision = "bf16" if task.bf16 else "no"
    if task.shards == "nothing":
        return Accelerator(cpu=True, mixed_precision=precision)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=task.shards == "parameters",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=task.recompute,
    )
    return Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)


def _prepare() -> str:
    """Imports it once for all ranks."""
    try:
        importlib.import_module("accelerate")
    except Exception as error:  # a broken package raises anything
        return f"{type(error).__name__}: {error}"
    return ""


ACCELERATE = Peer(
    name="Accelerate",
    start=_start,
    prepare=_prepare,
    lacks={
        "ZeRO-1": "nothing of its own shards optimizer states alone; it hands that to DeepSpeed",
        AUTOMATIC.name: "it searches for none",
    },
)
