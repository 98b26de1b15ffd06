"""Running batches through DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.job import Job, first_loss
from atorch_ns.pipeline import StageSet
from atorch_ns.torch_compat import tree_leaves
from opt_lib._ds_pipeline_layer import StageLayer

__all__ = ["DsPipelineRunner"]


class DsPipelineRunner:
    """Runs micro-batches by DeepSpeed's schedule (one forward, one backward), without its optimizer step.

    Args:
        job: the job.
        engine: DeepSpeed's pipeline engine.
        layer: this rank's stage as the engine calls it.
        stage_set: gets the micro-batches of a batch before their forward passes.
        loss_func: ``(micro-batch, output) -> loss``.
        reduce: completes the gradients after the last backward pass of a batch; collective.
    """

    def __init__(
        self,
        job: Job,
        engine: Any,
        layer: StageLayer,
        *,
        stage_set: StageSet,
        loss_func: Callable[[Any, Any], Any],
        reduce: Callable[[], object],
    ) -> None:
        assert job.stage_group is not None
        self._job = job
        self._engine = engine
        self._layer = layer
        self._stage_set = stage_set
        self._loss_func = loss_func
        self._reduce = reduce
        self._group = job.stage_group
        self._signature: object = None

    def forward_backward(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """As :class:`atorch_ns.job.BatchRunner` says."""
        self._begin(micro_batches, training=True)
        self._job.sums.expect(self._job.module)
        self._run(_passes(self._engine, len(micro_batches)))
        self._job.sums.run(self._job.module)
        self._reduce()
        return self._loss(len(micro_batches))

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """As :class:`atorch_ns.job.BatchRunner` says."""
        self._begin(micro_batches, training=False)
        self._run(self._engine._inference_schedule(len(micro_batches)))
        return self._loss(len(micro_batches))

    def _begin(self, micro_batches: Sequence[Any], *, training: bool) -> None:
        from deepspeed.runtime.pipe import p2p

        engine = self._engine
        p2p.init_process_groups(engine.grid)  # where the last engine of the process was another one
        signature = (training, [_shape(leaf) for leaf in tree_leaves(micro_batches[0])])
        reset = signature != self._signature
        self._signature = signature
        if reset:
            engine.reset_activation_shape()
        engine.module.train(training)
        engine.total_loss = None
        engine._compute_loss = True
        engine.set_dataiterator(_indices(len(micro_batches), self._job.device))
        self._layer.begin(reset=reset)
        self._stage_set.begin(micro_batches, self._loss_of)

    def _run(self, schedule: Any) -> None:
        try:
            self._engine._exec_schedule(schedule)
        finally:
            self._stage_set.finish()

    def _loss_of(self, micro_batch: Any, output: Any) -> torch.Tensor:
        return first_loss(self._loss_func(micro_batch, output)).reshape(())

    def _loss(self, num_micro_batches: int) -> torch.Tensor:
        loss = torch.zeros((), device=self._job.device)
        if self._layer.losses:
            loss += torch.stack(self._layer.losses).sum() / num_micro_batches
        last = dist.get_process_group_ranks(self._group)[-1]
        dist.broadcast(loss, src=last, group=self._group)
        return loss


def _passes(engine: Any, num_micro_batches: int) -> Any:
    """DeepSpeed's training schedule with forward and backward passes and what they exchange, and nothing more.

    Gradients are completed and the optimizer steps when ``train_step`` does so, in between which it may clip.
    """
    from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceGrads, ReduceTiedGrads, TrainSchedule

    left_out = (OptimizerStep, ReduceGrads, ReduceTiedGrads)

    class Passes(TrainSchedule):  # type: ignore[misc]
        def steps(self) -> Iterator[list[Any]]:
            for commands in super().steps():
                yield [command for command in commands if not isinstance(command, left_out)]

    return Passes(micro_batches=num_micro_batches, stages=engine.num_stages, stage_id=engine.stage_id)


def _indices(count: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the engine takes for data on the first and for labels on the last stage."""
    for index in range(count):
        number = torch.tensor(index, device=device)
        yield number, number


def _shape(leaf: Any) -> object:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
