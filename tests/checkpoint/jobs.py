"""Jobs to save and to load: short trainings of one small model under many strategies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from atorch_ns import checkpoint
from atorch_ns.job import Result
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import Trajectory, accelerate_case, snapshot

CASE = get_case("tied_llama")
SAVED_AT, STEPS = 3, 6

FP16 = {"dtype": "fp16", "init_scale": 1024.0, "growth_interval": 2}
STRATEGIES: dict[str, list[Any]] = {
    "alone": [],
    "ddp": ["ddp"],
    "fsdp": ["fsdp"],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "checkpointed": ["fsdp", "checkpoint"],
    "hybrid": [("parallel_mode", ([("zero", 2), ("data", 2)], None)), "zero2"],
    "hybrid1": [("parallel_mode", ([("zero", 2), ("data", 2)], None)), "zero1"],
    "half": ["zero1", ("half", "fp16")],
    "half_sharded": ["fsdp", ("half", "fp16")],
    "half_bf16": ["ddp", ("half", "bf16")],
    "amp": ["ddp", ("amp_native", FP16)],
    "amp_sharded": ["zero2", ("amp_native", FP16)],
}


def decayed_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def make(name: str, **arguments: Any) -> Result:
    """The job under the strategy of that name, with two groups and a scheduler."""
    given: dict[str, Any] = {
        "steps": STEPS,
        "optim_param_func": decayed_groups,
        "lr_scheduler_cls": torch.optim.lr_scheduler.StepLR,
        "lr_scheduler_args": {"step_size": 2, "gamma": 0.5},
        **arguments,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a strategy leaves out in one process
        return accelerate_case(given.pop("case", CASE), STRATEGIES[name], **given)


def batches(result: Result) -> Iterator[Any]:
    """The rest of the epoch."""
    assert result.dataloader is not None
    return iter(result.dataloader)


def step(result: Result, batch: Any) -> float:
    """One step of model and scheduler."""
    loss = float(result.train_step(batch))
    result.lr_scheduler.step()
    return loss


def uninterrupted(name: str) -> Trajectory:
    """All steps in one go."""
    result = make(name)
    initial = snapshot(result.model)
    losses = [step(result, batch) for batch in batches(result)]
    return Trajectory(losses=losses, initial=initial, final=snapshot(result.model))


def train_and_save(name: str, folder: Path, **options: Any) -> list[float]:
    """The first steps, and a checkpoint; the losses."""
    result = make(name)
    data = batches(result)
    losses = [step(result, next(data)) for _ in range(SAVED_AT)]
    pending = checkpoint.save(folder, result, extra={"tokens": 384, "tags": ["a", None]}, **options)
    if pending is not None:
        pending.wait()
    return losses


def learning_rates(result: Result) -> list[float]:
    """Of each group."""
    assert result.optim is not None
    return [float(group["lr"]) for group in result.optim.param_groups]
