"""The run under the strategy, on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atorch_ns.checkpoint._export import whole_tensors
from atorch_ns.cluster import Cluster
from atorch_ns.engine._probe_reference import part_of_ranks
from atorch_ns.engine._probe_run import bit_sum, judged_job, names_that_differ, train_step
from atorch_ns.job import Inputs, Result
from atorch_ns.method import Resolved

__all__ = ["RanksRun", "run_ranks_of"]

_UNROUNDED = (
    "rounding to fp8 is left out of the comparison: it moves parameters by as much as a lost gradient would, and would "
    "hide one"
)


@dataclass(frozen=True, kw_only=True)
class RanksRun:
    """What the strategy made of the model.

    Attributes:
        first, last: every parameter, whole, on the CPU, after the first step and after all.
        losses: of each step.
        differing: parameters whose values are not the same on all ranks.
        notes: what of the strategy did not take part.
    """

    first: Mapping[str, torch.Tensor]
    last: Mapping[str, torch.Tensor]
    losses: tuple[float, ...]
    differing: tuple[str, ...]
    notes: tuple[str, ...] = ()


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
    given = replace(inputs, model=copy.deepcopy(inputs.model), sample_batch=batches[0][0])
    result = judged_job(given, cluster, resolved, learning_rate=learning_rate, training=training)
    part = part_of_ranks(result.job.num_data_ranks)[result.job.data_rank]
    losses = [train_step(result, batches[0][part])]
    first = _whole(result)
    losses += [train_step(result, batch[part]) for batch in batches[1:]]
    last = _whole(result)
    sums = {name: bit_sum(weight) for name, weight in last.items()}
    return RanksRun(
        first=first,
        last=last,
        losses=tuple(losses),
        differing=names_that_differ(sums, cluster),
        notes=() if result.job.restore_precision is None else (_UNROUNDED,),
    )


def _whole(result: Result) -> Mapping[str, torch.Tensor]:
    return whole_tensors(result, everywhere=True, buffers=False)
