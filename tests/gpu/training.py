"""The same training by hand on one GPU, and under a strategy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from atorch_ns.testing import SyntheticDataset, get_case, map_tensors
from atorch_ns.testing.parity import ADAMW, Trajectory, accelerate_case, whole_parameters

__all__ = ["Run", "by_hand", "under"]

STEPS = 5
GLOBAL_BATCH = 8


class Run(NamedTuple):
    """What a strategy did, as plain values that cross processes.

    Attributes:
        trajectory: losses and parameters, on the CPU and in fp32.
        report: as text.
        peak_bytes: of the allocator, over the steps after the first.
    """

    trajectory: Trajectory
    report: str
    peak_bytes: int


def by_hand(name: str, *, autocast: torch.dtype | None = None) -> Trajectory:
    """The case on one GPU without this package: fp32 without TF32, or under autocast."""
    torch.set_float32_matmul_precision("highest")
    case = get_case(name)
    model = case.build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    data = SyntheticDataset(case, STEPS * GLOBAL_BATCH, seed=0)
    loader = torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH)
    initial, losses = _snapshot(model), []
    for batch in loader:
        there = map_tensors(lambda tensor: tensor.cuda(), batch)
        optimizer.zero_grad()
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = case.loss_func(there, case.call(model, there))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return Trajectory(losses=losses, initial=initial, final=_snapshot(model))


def under(name: str, strategy: Sequence[Any], arguments: dict[str, Any] | None = None) -> Run:
    """The case under a strategy, on this rank."""
    torch.set_float32_matmul_precision("highest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = accelerate_case(
            get_case(name), list(strategy), steps=STEPS, global_batch=GLOBAL_BATCH, **(arguments or {})
        )
    assert result.dataloader is not None
    assert result.job.device.type == "cuda"
    initial, losses = _on_cpu(whole_parameters(result)), []
    for step, batch in enumerate(result.dataloader):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(result.train_step(batch)))
    peak = torch.cuda.max_memory_allocated()
    trajectory = Trajectory(losses=losses, initial=initial, final=_on_cpu(whole_parameters(result)))
    return Run(trajectory, str(result.report), peak)


def _snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return _on_cpu(dict(model.named_parameters(remove_duplicate=False)))


def _on_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().float().cpu().clone() for name, weight in weights.items()}
