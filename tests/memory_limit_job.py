"""A job under a limit of memory, as a user's script has it: a search that keeps to it, and training with what it found.

::

    torchrun … --module tests.memory_limit_job find MODEL LIMIT_MIB FOLDER
    torchrun … --module tests.memory_limit_job train MODEL LIMIT_MIB FOLDER NUMBER STEPS

``find`` writes the best candidates that ran within the limit as ``0.json``, ``1.json``, …, the winner first, and what the
plain strategy took, in MiB. A limit of 0 is none that matters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from atorch_ns import Result, auto_accelerate
from atorch_ns.job import limit_memory

MIB = 2**20
VOCABULARY, TOKENS = 512, 32
NUM_BEST = 3
NUM_LAYERS, WIDTH = (4, 256) if int(os.environ["WORLD_SIZE"]) < 4 else (2, 512)
"""Of the language models. Each layer that four ranks divide exchanges some twenty times a step, which takes its time on
two cores: a thousand steps of four layers in eight micro-batches were more than an hour. Narrower, a process takes more
than the model."""


def build(name: str) -> tuple[nn.Module, Any, Any, str | None]:
    """Model, dataset, loss and how a batch is given to the model."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12)]
        data = torch.randn(64, 512)
        return nn.Sequential(*layers), data, lambda batch, output: (output - batch).square().mean(), None
    tokens = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (64, TOKENS))]
    if name == "gpt2":
        config: Any = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_embd=WIDTH,
            n_layer=NUM_LAYERS,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=11 * WIDTH // 4,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
        )
        model = LlamaForCausalLM(config)
    return model, tokens, lambda batch, output: output.loss, "unpack_dict"


def accelerate(name: str, **strategy: Any) -> Result:
    """The job, under a strategy or searching for one."""
    model, dataset, loss, form = build(name)
    _, result, _ = auto_accelerate(
        model,
        torch.optim.AdamW,
        dataset,
        loss,
        optim_args={"lr": 1e-4},
        model_input_format=form,
        dataloader_args={"batch_size": 32 // int(os.environ["WORLD_SIZE"])},
        **strategy,
    )
    assert result is not None
    return result


def find(name: str, limit_mib: int, folder: Path) -> None:
    """Searches; the precisions are left out, and what takes minutes to compile."""
    result = accelerate(
        name,
        excluded=["precision", "compile", "pipeline_parallel", "operator_parallel"],
        search={
            "memory_limit_gib": (limit_mib or 2048) / 1024,
            "max_trials": 10 if limit_mib else 1,
            "probe": False,
        },
        time_limit=300,
    )
    search = result.report.search
    if dist.get_rank():
        return
    assert search is not None
    fits = [
        row
        for row in search.rows
        if row.trial is not None and row.trial.succeeded and row.trial.max_needed_bytes <= limit_mib * MIB
    ]
    for number, row in enumerate(fits[:NUM_BEST]):
        row.candidate.strategy.save(folder / f"{number}.json")
    assert search.baseline is not None
    plain = search.baseline.trial
    known = plain is not None and plain.succeeded
    (folder / "plain.json").write_text(json.dumps(plain.max_needed_bytes / MIB if known and plain else None))


def train(name: str, limit_mib: int, strategy: Path, num_steps: int) -> None:
    """Trains under the limit."""
    with limit_memory(limit_mib * MIB, torch.device("cpu")):
        result = accelerate(name, load_strategy=str(strategy))
        assert result.dataloader is not None
        step = 0
        while step < num_steps:
            for batch in result.dataloader:
                result.train_step(batch)
                step += 1
    print(f"rank {dist.get_rank()}: {step} steps")  # noqa: T201  # what the test reads


if __name__ == "__main__":
    what, model_name, limit, place, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    if what == "find":
        find(model_name, int(limit), Path(place))
    else:
        train(model_name, int(limit), Path(place) / f"{rest[0]}.json", int(rest[1]))
    dist.destroy_process_group()
