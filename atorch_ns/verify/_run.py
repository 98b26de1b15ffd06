"""The run under the strategy, on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from atorch_ns.checkpoint._export import whole_tensors
from atorch_ns.cluster import Cluster
from atorch_ns.engine._probe_reference import MOMENTUM, part_of_ranks
from atorch_ns.engine._probe_run import bit_sum
from atorch_ns.errors import StepError
from atorch_ns.job import Inputs, Result, apply_strategy
from atorch_ns.method import Resolved

__all__ = ["RanksRun", "run_ranks_of"]

_MAX_SKIPS: Final = 24
"""A loss scale begins at 2^16 and halves with every skipped step."""


@dataclass(frozen=True, kw_only=True)
class RanksRun:
    """What the strategy made of the model.

    Attributes:
        first, last: every parameter, whole, on the CPU, after the first step and after all.
        losses: of each step.
        differing: parameters whose values are not the same on all ranks.
    """

    first: Mapping[str, torch.Tensor]
    last: Mapping[str, torch.Tensor]
    losses: tuple[float, ...]
    differing: tuple[str, ...]


def run_ranks_of(
    inputs: Inputs,
    cluster: Cluster,
    resolved: Resolved,
    batches: Sequence[Sequence[Any]],
    *,
    learning_rate: float,
    training: bool,
) -> RanksRun:
    """Applies the strategy to a copy of the model and trains on this rank's part of each batch; collective."""
    given = replace(
        inputs,
        model=copy.deepcopy(inputs.model),
        optim_args={"lr": learning_rate, "momentum": MOMENTUM},
        dataset=None,
        dataloader_args=None,
        distributed_sampler_cls=None,
        lr_scheduler_cls=None,
        lr_scheduler_args=None,
    )
    result = apply_strategy(given, cluster, resolved)
    result.model.train(training)
    part = part_of_ranks(result.job.num_data_ranks)[result.job.data_rank]
    losses = [_train(result, batches[0][part])]
    first = _whole(result)
    losses += [_train(result, batch[part]) for batch in batches[1:]]
    last = _whole(result)
    return RanksRun(first=first, last=last, losses=tuple(losses), differing=_differing(last, cluster))


def _train(result: Result, batch: Any) -> float:
    """One step, again and again while a loss scale that is too large has it skipped."""
    for _ in range(_MAX_SKIPS):
        loss = float(result.train_step(batch))
        if not result.train_step.skipped:
            return loss
    raise StepError(f"{_MAX_SKIPS} steps in a row were skipped, because gradients are infinite or NaN.")


def _whole(result: Result) -> Mapping[str, torch.Tensor]:
    return whole_tensors(result, everywhere=True, buffers=False)


def _differing(weights: Mapping[str, torch.Tensor], cluster: Cluster) -> tuple[str, ...]:
    if not cluster.distributed:
        return ()
    sums = {name: bit_sum(weight) for name, weight in weights.items()}
    gathered: list[dict[str, int]] = [{}] * cluster.world_size
    dist.all_gather_object(gathered, sums)
    names = dict.fromkeys(name for one in gathered for name in one)
    return tuple(name for name in names if len({one.get(name) for one in gathered}) > 1)
