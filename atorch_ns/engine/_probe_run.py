"""The probe's run under the strategy, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from atorch_ns.checkpoint._export import whole_tensors
from atorch_ns.cluster import Cluster
from atorch_ns.engine._probe_reference import MOMENTUM, part_of_ranks
from atorch_ns.errors import StepError
from atorch_ns.job import Inputs, Result, apply_strategy
from atorch_ns.method import Resolved

__all__ = ["StrategyRun", "bit_sum", "judged_job", "names_that_differ", "run_strategy", "train_step"]

_MAX_SKIPS: Final = 24
"""A loss scale begins at 2^16 and halves with every skipped step."""


@dataclass(frozen=True, kw_only=True)
class StrategyRun:
    """What the strategy made of the small model.

    Attributes:
        final: every weight, whole, on the CPU, by its first name; on rank 0 only.
        losses: of each step.
        differing: names of weights that ranks should hold alike and do not.
    """

    final: Mapping[str, torch.Tensor]
    losses: tuple[float, ...]
    differing: tuple[str, ...] = ()


def run_strategy(
    inputs: Inputs,
    cluster: Cluster,
    resolved: Resolved,
    batches: Sequence[Sequence[Any]],
    *,
    learning_rate: float,
    training: bool,
) -> StrategyRun:
    """Applies the strategy and trains on this rank's part of each batch; collective.

    Args:
        inputs: the small model, with SGD as optimizer; the model is used up.
        cluster: what the job runs on.
        resolved: the strategy.
        batches: ``[step][part]``.
        learning_rate: of SGD.
        training: whether the model is in training mode.
    """
    given = replace(inputs, sample_batch=batches[0][0])
    result = judged_job(given, cluster, resolved, learning_rate=learning_rate, training=training)
    part = part_of_ranks(result.job.num_data_ranks)[result.job.data_rank]
    losses = tuple(train_step(result, batch[part]) for batch in batches)
    final = whole_tensors(result, buffers=False)
    return StrategyRun(final=final, losses=losses, differing=_differing(result))


def judged_job(
    inputs: Inputs, cluster: Cluster, resolved: Resolved, *, learning_rate: float, training: bool
) -> Result:
    """The job whose parameters are compared with those of one process; collective. The model is used up.

    What rounds to fp8 is left out of it: that moves parameters by as much as a wrong strategy would, so that what is
    judged is everything else.

    Args:
        inputs: with SGD as optimizer, and a batch of one rank as sample: there is no dataset to take one from.
        cluster, resolved: as for :func:`run_strategy`.
        learning_rate: of SGD.
        training: whether the model is in training mode.
    """
    given = replace(
        inputs,
        optim_args={"lr": learning_rate, "momentum": MOMENTUM},
        dataset=None,
        dataloader_args=None,
        distributed_sampler_cls=None,
        lr_scheduler_cls=None,
        lr_scheduler_args=None,
    )
    result = apply_strategy(given, cluster, resolved)
    if result.job.restore_precision is not None:
        for root in result.job.roots:
            result.job.restore_precision(root)
    result.model.train(training)
    return result


def train_step(result: Result, batch: Any) -> float:
    """One step, again and again while a loss scale that is too large has it skipped."""
    for _ in range(_MAX_SKIPS):
        loss = float(result.train_step(batch))
        if not result.train_step.skipped:
            return loss
    raise StepError(f"{_MAX_SKIPS} steps in a row were skipped, because gradients are infinite or NaN.")


def _differing(result: Result) -> tuple[str, ...]:
    """Names of plain weights whose bits differ between ranks; collective."""
    weights = result.job.make_states(result.job, result.optim).weights()
    sums = {name: bit_sum(weight) for name, weight in weights.items() if not isinstance(weight, DTensor)}
    return names_that_differ(sums, result.job.cluster)


def names_that_differ(sums: Mapping[str, int], cluster: Cluster) -> tuple[str, ...]:
    """Names whose sums differ among the ranks that have them; collective."""
    if not cluster.distributed:
        return ()
    gathered: list[Mapping[str, int]] = [{}] * cluster.world_size
    dist.all_gather_object(gathered, sums)
    names = dict.fromkeys(name for one in gathered for name in one)
    return tuple(name for name in names if len({one[name] for one in gathered if name in one}) > 1)


def bit_sum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes, each weighted by its place in a word: equal for equal bits."""
    flat = tensor.detach().contiguous().flatten()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return int(flat.view(kind).sum(dtype=torch.int64))
