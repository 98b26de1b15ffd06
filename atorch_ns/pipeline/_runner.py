"""Running batches through a pipeline with the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.errors import AtorchError, StepError
from atorch_ns.pipeline._failure import FailureNotes, original, tear_down
from atorch_ns.pipeline._forward_only import run_forward
from atorch_ns.pipeline._graph import TensorSpec
from atorch_ns.pipeline._pass import StageRange
from atorch_ns.pipeline._schedules import ScheduleInfo
from atorch_ns.pipeline._stage import LossOf, StageModule
from atorch_ns.pipeline._stage_set import Signature, StageSet, signature

__all__ = ["PipelineRunner"]

_MOST_SCHEDULES = 8
"""Shapes of micro-batches whose buffers are kept, those that were used last."""


class PipelineRunner:
    """Runs micro-batches forward and backward through the stages of a pipeline.

    Every rank of the pipeline has the whole micro-batches, so only what crosses cuts is sent.

    Args:
        stage_set: the stages of this rank.
        info: the schedule.
        group: the ranks of the pipeline; used for nothing else, since it is torn down when a step fails.
        device: where they compute.
        loss_of: ``(micro-batch, output) -> loss``, 0-d.
        whole_backward: whether gradients of inputs and of weights must be computed together on all stages, even
            where the schedule would do it apart.
    """

    def __init__(
        self,
        stage_set: StageSet,
        info: ScheduleInfo,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        loss_of: LossOf,
        whole_backward: bool = False,
    ) -> None:
        self._set = stage_set
        self._info = info
        self._group = group
        self._device = device
        self._loss_of = loss_of
        self._whole_backward = whole_backward
        self._schedules: OrderedDict[tuple[Signature, int], Any] = OrderedDict()
        self._made: list[Any] = []
        self._notes = FailureNotes(group)
        self._failed = ""

    def forward_backward(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Adds the gradients of the mean loss over ``micro_batches``; collective over the pipeline.

        Returns:
            That loss, 0-d float32 and detached, on every rank.
        """
        with self._failing():
            return self._forward_backward(micro_batches)

    def _forward_backward(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        num = len(micro_batches)
        all_ranges = self._set.begin(micro_batches, lambda batch, output: self._loss_of(batch, output) / num)
        losses: list[torch.Tensor] = []
        target = torch.zeros(num) if self._set.has_last else None  # torch wants one to call the loss function
        try:
            schedule = self._schedule(micro_batches, all_ranges)
            schedule.step(target=target, losses=losses, return_outputs=False)
        finally:
            self._set.finish()
        return self._everywhere([loss.detach() for loss in losses], 1)

    def forward(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """The mean loss over ``micro_batches`` without gradients, as :meth:`forward_backward` returns it."""
        with self._failing():
            num = len(micro_batches)
            all_ranges = self._set.begin(micro_batches, self._loss_of)
            try:
                losses = run_forward(self._set, all_ranges, num, group=self._group, device=self._device)
            finally:
                self._set.finish()
            return self._everywhere(losses, num)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Lets all ranks of the pipeline fail if one does, each with the reason.

        Raises:
            StepError: where this rank failed.
            RankError: where another did.
        """
        if self._failed:
            raise StepError(
                f"this pipeline has stopped: {self._failed.rstrip('.')}. Start the job anew, from a checkpoint."
            )
        try:
            yield
        except Exception as error:
            cause = original(error)
            group, stages = self._group, [stage.number for stage in self._set.stages]
            own = self._is_own(error)
            if not own:
                self._notes.note_lost()
            else:
                self._notes.note_own(cause, stages)
            tear_down(group, error, self._let_go)
            del group
            try:
                if own:
                    self._notes.raise_own(cause, stages)
                self._notes.raise_lost(cause)
            except AtorchError as told:
                self._failed = str(told)
                raise

    def _is_own(self, error: Exception) -> bool:
        """Whether it comes from this rank's part of the model, and not from the connection to another."""
        if any(stage.failed for stage in self._set.stages) or not isinstance(error, RuntimeError):
            return True
        return isinstance(error, AtorchError) or "[Stage" in str(error)

    def _let_go(self) -> None:
        del self._group
        self._schedules.clear()
        for stage in self._made:
            stage.group = None
        self._made.clear()

    def _everywhere(self, losses: Sequence[torch.Tensor], divisor: int) -> torch.Tensor:
        """The sum of the last stage's losses, divided, on every rank."""
        total = torch.zeros((), device=self._device)
        if self._set.has_last:
            total += torch.cat(list(losses)).float().sum() / divisor
        dist.broadcast(total, group=self._group, group_src=self._set.rank_of[-1])
        return total

    def _schedule(self, micro_batches: Sequence[Any], all_ranges: Sequence[StageRange]) -> Any:
        num = len(micro_batches)
        key = (signature(micro_batches[0]), num)
        if key not in self._schedules:
            made = [
                self._pipeline_stage(stage, all_ranges, whole=self._whole(stage, micro_batches[0]))
                for stage in self._set.stages
            ]
            self._schedules[key] = self._info.torch_class()(
                made[0] if self._info.is_single else made, num, loss_fn=_passed_through, scale_grads=False
            )
            while len(self._schedules) > _MOST_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _whole(self, stage: StageModule, micro_batch: Any) -> bool:
        if not self._info.splits_backward or stage.number == 0:
            return False
        return self._whole_backward or not self._set.splits_backward(micro_batch, stage.number)

    def _pipeline_stage(self, stage: StageModule, all_ranges: Sequence[StageRange], *, whole: bool) -> Any:
        from torch.distributed.pipelining import PipelineStage

        own = all_ranges[stage.number]
        received = own.received.carried if own.received else ()
        outputs: tuple[torch.Tensor, ...] = (torch.empty(1, device="meta"),)
        if own.sent is not None:
            outputs = tuple(_example(one.spec) for one in own.sent.carried)
        made = PipelineStage(
            stage,
            stage.number,
            len(all_ranges),
            self._device,
            input_args=tuple(_example(one.spec) for one in received),
            output_args=outputs,
            group=self._group,
            dw_builder=_nothing_left if whole else None,
        )
        self._made.append(made)
        return made


def _nothing_left() -> Callable[[], None]:
    """What is left to do for the weights after a backward pass that has computed all gradients."""
    return lambda: None


def _passed_through(loss: torch.Tensor, _: Any) -> torch.Tensor:
    """The last stage has computed the loss."""
    return loss


def _example(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)
