"""What works without any extra: a job, and the command lines that plan, explain and train it."""

from __future__ import annotations

from typing import Final

EXTRA_PACKAGES: Final = (
    "accelerate", "bitsandbytes", "deepspeed", "fairscale", "ipykernel", "liger_kernel", "nbclient", "optuna", "peft",
    "psutil", "safetensors", "scipy", "tensorboard", "torchao", "torchvision", "transformers", "triton", "wandb",
)  # fmt: skip
"""Import names of what the extras bring."""

_JOB = "--model job:build --sample job:sample --loss job:loss"
PLANNING: Final = (
    f"plan {_JOB} --cluster 8xH100-80GB --report report.json --save plan.json",
    f"plan {_JOB} --cluster 2xcpu --operators 2",
    f"estimate {_JOB} --cluster 2xH100-80GB --strategy fsdp,amp_native",
    "explain report.json --why fsdp",
    "report report.json --html report.html",
    "diff plan.json plan.json",
    "methods",
    "methods fp8",
    "env",
    "strategy show plan.json",
    "strategy diff plan.json plan.json",
    "strategy convert ds_config.json converted.yaml",
)
"""Verbs that start no process, in an order in which each finds the files of those before it."""
TRAINING: Final = (
    f"verify {_JOB} --strategy fsdp --nproc 2",
    f"search {_JOB} --nproc 2 --time-limit 10 --history history.jsonl --save found.json",
    "history history.jsonl",
    "calibrate --nproc 2 --seconds 5 --output calibration.yaml",
    f"estimate {_JOB} --cluster calibration.yaml --strategy found.json",
    "doctor --nproc 2",
)
"""Verbs that start ranks, and those that read what they wrote."""

FILES: Final = {
    "job.py": """
import torch
from torch import nn


def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))


def sample():
    return torch.zeros(8, 32)


def loss(batch, output):
    return (output - batch).square().mean()
""",
    "ds_config.json": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
}
"""What the verbs read, by name."""
