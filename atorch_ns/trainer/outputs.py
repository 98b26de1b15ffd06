"""Outputs of a step's micro-batches, summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.data import StepOutput
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.trainer.args import TrainerArgs
from atorch_ns.trainer.components import resolve_component
from atorch_ns.trainer.hooks import AggregatedOutputs


@dataclass(frozen=True)
class Aggregation:
    """Summation of outputs over the ranks that see different data.

    Attributes:
        function: the user's function of outputs and a group; ``None`` to sum only losses.
        job: the job.
    """

    function: Callable[..., Any] | None
    job: Job

    @classmethod
    def of(cls, args: TrainerArgs, job: Job) -> Aggregation:
        """Creates the summation given by the configuration."""
        function = args.optimizer.aggregate_outputs_fn
        return cls(
            None if function is None else resolve_component(function, what="optimizer.aggregate_outputs_fn"),
            job,
        )

    @property
    def wants_outputs(self) -> bool:
        """True if it needs more than losses."""
        return self.function is not None

    def over_ranks(self, output: StepOutput, num_real: int) -> AggregatedOutputs:
        """Sums the outputs over ranks. Collective.

        Args:
            output: this rank's output of the step.
            num_real: number of its micro-batches that count.

        Raises:
            InputError: if the user's function returns something else.
        """
        job = self.job
        group = None if job.mesh is None else job.mesh.data_group
        if self.function is not None:
            result = self.function(list(output.outputs), group)  # summed by the user
            if not isinstance(result, AggregatedOutputs) or result.loss_sum is None or not result.num_batches:
                raise InputError(
                    "optimizer.aggregate_outputs_fn must return AggregatedOutputs with loss_sum and num_batches; it returned "
                    f"{result!r}."
                )
            return result
        pair = torch.tensor([0.0, num_real], dtype=torch.float64, device=job.device)  # loss sum, count
        pair[0] = output.losses.double().sum()
        if group is not None and job.num_data_ranks > 1:
            dist.all_reduce(pair, group=group)
        loss_sum, count = pair.tolist()
        return AggregatedOutputs(loss_sum=loss_sum, num_batches=int(count))
