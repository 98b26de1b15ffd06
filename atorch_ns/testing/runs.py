"""Training a case through ``auto_accelerate``, to be held against :func:`reference_run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.checkpoint._export import whole_tensors
from atorch_ns.job import Result
from atorch_ns.testing.models import Case, SyntheticDataset
from atorch_ns.testing.parity import ADAMW, Trajectory

__all__ = ["accelerate_case", "accelerated_run", "whole_parameters"]


def accelerate_case(
    case: Case,
    strategy: Any,
    *,
    steps: int = 5,
    global_batch: int = 8,
    seed: int = 0,
    model: nn.Module | None = None,
    optim_args: Mapping[str, Any] = ADAMW,
    **arguments: Any,
) -> Result:
    """The case's model, data and loss under ``strategy``; on all ranks of the process group, if there is one.

    Args:
        case: model, data and loss.
        strategy: as ``load_strategy``.
        steps: how many global batches the data holds.
        global_batch: samples a step, over all ranks.
        seed: of the data.
        model: in place of the case's own.
        optim_args: for AdamW.
        arguments: more arguments of ``auto_accelerate``.
    """
    from atorch_ns.api import auto_accelerate

    given: dict[str, Any] = {
        "optim_func": torch.optim.AdamW,
        "optim_args": dict(optim_args),
        "dataset": SyntheticDataset(case, steps * global_batch, seed=seed),
        "dataloader_args": {"batch_size": global_batch},
        "loss_func": case.loss_func,
        "model_input_format": case.model_input_format,
        "load_strategy": strategy,
        **arguments,
    }
    _, result, _ = auto_accelerate(case.build() if model is None else model, **given)
    assert result is not None
    return result


def accelerated_run(
    case: Case,
    strategy: Any,
    *,
    step: Callable[[Result, Any], torch.Tensor] | None = None,
    **arguments: Any,
) -> Trajectory:
    """Trains the case as :func:`reference_run` does, but through ``auto_accelerate``.

    Args:
        case: model, data and loss.
        strategy: as ``load_strategy``.
        step: trains on one batch and returns the mean loss; ``None`` for ``result.train_step``.
        arguments: of :func:`accelerate_case`.
    """
    result = accelerate_case(case, strategy, **arguments)
    initial, losses = whole_parameters(result), []
    assert result.dataloader is not None
    for batch in result.dataloader:
        loss = result.train_step(batch) if step is None else step(result, batch)
        losses.append(float(loss))
    return Trajectory(losses=losses, initial=initial, final=whole_parameters(result))


def whole_parameters(result: Result) -> dict[str, torch.Tensor]:
    """Copies on the CPU of all parameters of the user's model, whole, by the user's names; collective.

    As :func:`snapshot` of the plain model, on every rank, however the strategy has divided it. Where the job keeps
    fp32 masters, those. Tied parameters stand under each of their names.
    """
    weights, tied = whole_tensors(result, everywhere=True, buffers=False), result.job.tied
    return {alias: weight for name, weight in weights.items() for alias in (name, *tied.get(name, ()))}


def plain_loop_step(result: Result, batch: Any) -> torch.Tensor:
    """One step written out as the specification shows it, with the model called by the case's format."""
    from atorch_ns.data import call_model

    assert result.optim is not None
    assert result.loss_func is not None
    device = result.job.device
    data = result.prepare_input(batch, device)
    result.optim.zero_grad()
    loss = result.loss_func(data, call_model(result.model, data, result.job.inputs.model_input_format))
    if result.args["use_optim_backward"]:
        result.optim.backward(loss)  # type: ignore[attr-defined]
    else:
        loss.backward()
    result.optim.step()
    mean: torch.Tensor = loss.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean
