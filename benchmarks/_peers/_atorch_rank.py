"""One rank that ATorch 0.2.5 trains on, in its own interpreter; driven line by line through its standard input.

``python _atorch_rank.py TASK SIZE NUM_TOKENS`` answers ``build`` and every ``step`` with one line of JSON: the loss
and the processor seconds spent so far, or what went wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._llama import Llama, next_token_loss
from benchmarks._peers._peer import AUTOMATIC, OPTIM_ARGS, Task, batch_of, task_named

__all__ = ["main"]


def main() -> None:
    """Answers until its input ends."""
    # ATorch logs to the standard output, which is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, size, num_tokens = sys.argv[1], Llama(**json.loads(sys.argv[2])), int(sys.argv[3])
    task, rank = task_named(name), int(os.environ["RANK"])
    import atorch  # type: ignore[import-not-found]
    from atorch.common.log_utils import default_logger  # type: ignore[import-not-found]

    logged = _LastError()
    default_logger.addHandler(logged)
    atorch.init_distributed("gloo")
    model, batch = size.build(), batch_of(task, size, num_tokens, rank)
    step: Callable[[], float] | None = None
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for command in sys.stdin:
        answer: dict[str, Any] = {}
        try:
            if command.strip() == "build":
                step = _built(task, model, batch)
            else:
                assert step is not None
                answer["loss"] = step()
        except Exception as error:
            answer["error"] = logged.last or f"{type(error).__name__}: {error}"
        answer["cpu_s"] = time.process_time()
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


class _LastError(logging.Handler):
    """Keeps the last line of what was logged as an error: ATorch's own exceptions do not carry the reason."""

    def __init__(self) -> None:
        super().__init__(level=logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage().strip().splitlines()[-1]


def _built(task: Task, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    from atorch.auto import auto_accelerate  # type: ignore[import-not-found]

    automatic = task is AUTOMATIC
    status, result, _ = auto_accelerate(
        model,
        torch.optim.AdamW,
        dataset=[{"input_ids": row} for row in batch["input_ids"].repeat(32, 1)] if automatic else None,
        dataloader_args={"batch_size": task.batch_size} if automatic else None,
        loss_func=next_token_loss,
        optim_args=OPTIM_ARGS,
        model_input_format="unpack_dict",
        prepare_input=lambda data, device: data,
        load_strategy=None if automatic else _strategy(task),
        ignore_dryrun_on_load_strategy=True,
    )
    if not status:
        raise RuntimeError("auto_accelerate found no strategy")
    if task.shards != "nothing" and type(result.optim) is torch.optim.AdamW and _whole(result.model):
        raise RuntimeError(f"nothing was sharded: {type(result.model).__name__} with a plain AdamW")

    def step() -> float:
        result.optim.zero_grad()
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        result.optim.step()
        return float(loss.detach())

    return step


def _whole(model: torch.nn.Module) -> bool:
    return isinstance(model, torch.nn.parallel.DistributedDataParallel)


def _strategy(task: Task) -> list[Any]:
    """The same features in ATorch's own words."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    steps: list[Any] = ["parallel_mode"]
    if task.shards != "nothing":
        method = {"optimizer": "zero1", "gradients": "zero2", "parameters": "fsdp"}[task.shards]
        # On CPUs its zero2 is fairscale's, which wraps the whole model.
        steps.append((method, {"atorch_wrap_cls": (LlamaDecoderLayer,)}) if method == "fsdp" else method)
    if task.bf16:
        steps.append(("amp_native", {"dtype": torch.bfloat16}))
    if task.recompute:
        steps.append(("checkpoint", {"wrap_class": (LlamaDecoderLayer,), "no_reentrant": True}))
    return steps


if __name__ == "__main__":
    main()
