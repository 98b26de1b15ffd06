"""Training a model under a strategy on all ranks, for its parameters to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from atorch_ns.apply import apply_strategy
from atorch_ns.checkpoint.export import whole_tensors
from atorch_ns.cluster import Cluster
from atorch_ns.errors import StepError
from atorch_ns.job import Inputs, Result
from atorch_ns.method import Resolved
from atorch_ns.numerics.reference import MOMENTUM, part_of_ranks
from atorch_ns.sharding.compare import sum_of_bits

_MAX_SKIPS: Final = 24
"""A loss scale begins at 2^16 and halves with every skipped step."""


_UNROUNDED: Final = (
    "rounding to fp8 is left out of the comparison: it moves parameters by as much as a lost gradient would, and would "
    "hide one"
)


@dataclass(frozen=True, kw_only=True)
class StrategyRun:
    """The result of training under a strategy.

    Attributes:
        first: whole parameters on the CPU after the first step, by first name; empty without ``everywhere``.
        last: the same after all steps; on rank 0 only without ``everywhere``.
        losses: the mean loss of each step.
        num_micro_batches: parts that a rank's batch was split into.
        differing: names of weights that ranks should hold alike and do not.
        notes: parts of the strategy that were left out, as sentences.
    """

    first: Mapping[str, torch.Tensor]
    last: Mapping[str, torch.Tensor]
    losses: tuple[float, ...]
    num_micro_batches: int = 1
    differing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def run_strategy(
    inputs: Inputs,
    cluster: Cluster,
    resolved: Resolved,
    batches: Sequence[Sequence[Any]],
    *,
    learning_rate: float,
    training: bool,
    everywhere: bool = False,
) -> StrategyRun:
    """Applies the strategy and trains on this rank's part of each batch. Collective.

    Args:
        inputs: the model and its loss, with SGD as optimizer; the model is used up.
        cluster: the ranks and devices of the job.
        resolved, batches: the strategy, and ``[step][part]``.
        learning_rate, training: the learning rate of SGD, and whether the model is in training mode.
        everywhere: gather whole parameters on every rank, after the first step too, and compare them over all
            ranks; else on rank 0, and only weights that are not divided are compared.
    """
    job_inputs = replace(inputs, sample_batch=batches[0][0])
    result = judged_job(job_inputs, cluster, resolved, learning_rate=learning_rate, training=training)
    part = part_of_ranks(result.job.num_data_ranks)[result.job.data_rank]
    losses = [train_step(result, batches[0][part])]
    first = whole_tensors(result, everywhere=True, buffers=False) if everywhere else {}
    losses += [train_step(result, batch[part]) for batch in batches[1:]]
    _free_training_memory(result)  # before whole parameters take its place
    last = whole_tensors(result, everywhere=everywhere, buffers=False)
    return StrategyRun(
        first=first,
        num_micro_batches=len(result.job.step.micro_batches(batches[0][part])),
        last=last,
        losses=tuple(losses),
        differing=_differing_weights(last if everywhere else _undivided_weights(result), cluster),
        notes=() if result.job.precision.restore is None else (_UNROUNDED,),
    )


def _free_training_memory(result: Result) -> None:
    assert result.optim is not None
    result.optim.zero_grad(set_to_none=True)
    for state in result.optim.state.values():
        state.pop("momentum_buffer", None)


def judged_job(
    inputs: Inputs, cluster: Cluster, resolved: Resolved, *, learning_rate: float, training: bool
) -> Result:
    """The job whose parameters are compared with those of one process. The model is used up. Collective.

    Rounding to fp8 is left out, since it moves parameters by as much as a wrong strategy would.

    Args:
        inputs: the user's objects with SGD, and one rank's batch as sample in place of a dataset.
        cluster, resolved, learning_rate, training: arguments of :func:`run_strategy`.
    """
    job_inputs = replace(
        inputs,
        optim_args={"lr": learning_rate, "momentum": MOMENTUM},
        dataset=None,  # batches are passed by hand
        dataloader_args=None,
        distributed_sampler_cls=None,
        lr_scheduler_cls=None,
        lr_scheduler_args=None,
    )
    result = apply_strategy(job_inputs, cluster, resolved)
    if result.job.step.same_weights is not None:  # compared here by value, with all that is wrong
        result.job.step.same_weights.is_on = False
    if result.job.precision.restore is not None:
        for root in result.job.roots:
            result.job.precision.restore(root)
    result.model.train(training)
    return result


def train_step(result: Result, batch: Any) -> float:
    """Runs one step, repeated while a too large loss scale makes the optimizer skip it."""
    for _ in range(_MAX_SKIPS):
        loss = float(result.train_step(batch))
        if not result.train_step.skipped:
            return loss
    raise StepError(f"{_MAX_SKIPS} steps in a row were skipped, because gradients are infinite or NaN.")


def _undivided_weights(result: Result) -> dict[str, torch.Tensor]:
    weights = result.job.make_states(result.job, result.optim).weights()
    return {name: weight for name, weight in weights.items() if not isinstance(weight, DTensor)}


def _differing_weights(weights: Mapping[str, torch.Tensor], cluster: Cluster) -> tuple[str, ...]:
    checksums = {name: int(sum_of_bits(weight)) for name, weight in weights.items()}
    of_ranks = cluster.gathered(checksums)  # each rank has the weights of its stage
    names = dict.fromkeys(name for sums in of_ranks for name in sums)
    return tuple(name for name in names if len({sums[name] for sums in of_ranks if name in sums}) > 1)
