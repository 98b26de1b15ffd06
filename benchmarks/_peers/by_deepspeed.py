"""DeepSpeed: ``deepspeed.initialize`` with ZeRO of the stage that divides the same things."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._llama import Llama, next_token_loss
from benchmarks._peers._peer import AUTOMATIC, OPTIM_ARGS, Peer, Task, Trainer, batch_of

__all__ = ["DEEPSPEED"]

_STAGES = {"nothing": 0, "optimizer": 1, "gradients": 2, "parameters": 3}


def _start(task: Task, size: Llama, num_tokens: int, rank: int) -> Callable[[], Trainer]:
    deepspeed = _import()
    model, batch = size.build(), batch_of(task, size, num_tokens, rank)
    if task.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    def build() -> Trainer:
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIM_ARGS)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_config(task), dist_init_required=False
        )

        def step() -> float:
            loss = next_token_loss(batch, engine(**batch))
            engine.backward(loss)
            engine.step()
            return float(loss.detach())

        return Trainer(step=step)

    return build


def _import() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Its shared-memory collectives are compiled for minutes; gloo does them instead.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed


def _config(task: Task) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": task.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # the default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": _STAGES[task.shards]},
        "torch_autocast": {"enabled": task.bf16, "dtype": "bfloat16"},
    }


DEEPSPEED = Peer(
    name="DeepSpeed",
    start=_start,
    lacks={AUTOMATIC.name: "not measured: its autotuner starts whole jobs by a launcher of its own"},
)
