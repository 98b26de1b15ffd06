"""``auto_accelerate``, in a loop that its user writes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atorch_ns import auto_accelerate
from benchmarks._llama import Llama, next_token_loss
from benchmarks._peers._peer import OPTIM_ARGS, Peer, Task, Trainer, batch_of

__all__ = ["OURS"]

_CPU = torch.device("cpu")


def _start(task: Task, size: Llama, num_tokens: int, rank: int) -> Callable[[], Trainer]:
    model, batch = size.build(), batch_of(task, size, num_tokens, rank)

    def build() -> Trainer:
        _, result, _ = auto_accelerate(
            model,
            torch.optim.AdamW,
            loss_func=next_token_loss,
            model_input_format="unpack_dict",
            optim_args=OPTIM_ARGS,
            load_strategy=list(task.strategy),
        )
        assert result is not None
        job, optimizer, loss_func = result, result.optim, result.loss_func
        assert optimizer is not None
        assert loss_func is not None

        def step() -> float:
            optimizer.zero_grad()
            data = job.prepare_input(batch, _CPU)
            loss = loss_func(data, job.model(**data))
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return Trainer(step=step)

    return build


OURS = Peer(name="atorch_ns", start=_start)
