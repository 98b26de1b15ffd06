"""Pipeline runner: runs batches through the stages with the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.capture.nests import tensors_of
from atorch_ns.errors import AtorchError, StepError
from atorch_ns.pipeline.cut.crossing import Crossing
from atorch_ns.pipeline.cut.graph import CallGraph, TensorSpec
from atorch_ns.pipeline.cut.install import ranges
from atorch_ns.pipeline.run.failure import FailureNotes, original, tear_down
from atorch_ns.pipeline.run.forward_pass import StageRange, backward_splits
from atorch_ns.pipeline.run.stage import LossOf, StageModule
from atorch_ns.pipeline.schedule.schedules import ScheduleInfo

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors of a micro-batch."""


def signature(batch: Any) -> Signature:
    """The shapes and dtypes of a batch, which decide those of all tensors that cross cuts."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch))


class StageSet:
    """The stages of one rank.

    Args:
        stages: the stages, in the order of the model.
        cuts: the calls before which the model is cut.
        rank_of: the rank along the pipeline of every stage.
        paths: the paths of the units, in the order of their calls when the model was cut.
        trace: ``micro-batch -> its graph``; called once for micro-batches of the same shapes.
        draw_seed: returns a seed for the next batch, the same on all stages of a pipeline.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        cuts: Sequence[int],
        rank_of: Sequence[int],
        paths: Sequence[str],
        trace: Callable[[Any], CallGraph],
        draw_seed: Callable[[], int],
    ) -> None:
        self.stages = tuple(stages)
        self.rank_of = tuple(rank_of)
        self._cuts = tuple(cuts)
        self._paths = tuple(paths)
        self._trace = trace
        self._draw_seed = draw_seed
        self._traced: dict[Signature, tuple[CallGraph, tuple[StageRange, ...]]] = {}

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stages[-1].is_last

    def splits_backward(self, micro_batch: Any, stage: int) -> bool:
        """Whether a stage's gradients of inputs and of weights can be computed separately for such micro-batches."""
        graph, all_ranges = self._known(micro_batch)
        return backward_splits(graph, all_ranges[stage])

    def begin(self, micro_batches: Sequence[Any], loss_of: LossOf) -> tuple[StageRange, ...]:
        """Prepares every stage for one forward pass of each micro-batch, in order.

        Args:
            micro_batches: all of the same shapes.
            loss_of: ``(micro-batch, output) -> loss``, 0-d.

        Returns:
            All stages of the pipeline, as they are for these shapes.

        Raises:
            StepError: if the model calls other units than when it was cut.
        """
        graph, all_ranges = self._known(micro_batches[0])
        seed = self._draw_seed()
        for stage in self.stages:
            stage.begin(micro_batches, graph, all_ranges[stage.number], loss_of, seed=seed)
        return all_ranges

    def finish(self) -> None:
        """Releases the batch."""
        for stage in self.stages:
            stage.finish()

    def _known(self, micro_batch: Any) -> tuple[CallGraph, tuple[StageRange, ...]]:
        key = signature(micro_batch)
        if key not in self._traced:
            graph = self._trace(micro_batch)
            if graph.paths != self._paths:
                raise StepError(_other_calls(self._paths, graph.paths))
            self._traced[key] = (graph, ranges(graph, self._cuts))
        return self._traced[key]


def _other_calls(before: Sequence[str], now: Sequence[str]) -> str:
    place = next(
        (i for i, (one, other) in enumerate(zip(before, now, strict=False)) if one != other),
        min(len(before), len(now)),
    )
    was, is_ = (paths[place] if place < len(paths) else "nothing" for paths in (before, now))
    return (
        f"for this batch the model calls {is_} where it called {was} when it was cut into stages. In a pipeline the "
        "calls must be the same for every batch."
    )


Tensors = tuple[torch.Tensor, ...]


def _receive(crossing: Crossing, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensors:
    specs = [one.spec for one in crossing.carried]
    tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs)
    works = [dist.irecv(tensor, group=group, group_src=source) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()
    return tensors


def _send(tensors: Tensors, target: int, group: dist.ProcessGroup) -> list[tuple[torch.Tensor, Any]]:
    """Starts sending; each tensor is returned with its work, since it must live until it has been sent."""
    return [(tensor, dist.isend(tensor, group=group, group_dst=target)) for tensor in tensors]


_MOST_SCHEDULES = 8
"""The most shapes of micro-batches whose buffers are kept, those used last."""


class PipelineRunner:
    """Runs micro-batches forward and backward through the stages of a pipeline.

    Every rank of the pipeline has the whole micro-batches, so only what crosses cuts is sent.

    Args:
        group: the ranks of the pipeline; used for nothing else, since it is torn down when a step fails.
        loss_of: ``(micro-batch, output) -> loss``, 0-d.
        whole_backward: whether gradients of inputs and of weights must be computed together on all stages, even
            where the schedule would separate them.
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
        target = (
            torch.zeros(num) if self._set.has_last else None
        )  # without one torch does not call the loss function
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
                losses = self._forward(all_ranges, num)
            finally:
                self._set.finish()
            return self._everywhere(losses, num)

    @torch.no_grad()
    def _forward(self, all_ranges: Sequence[StageRange], num_micro_batches: int) -> list[torch.Tensor]:
        """Runs all micro-batches through each of this rank's stages, in the order of the model; collective.

        Returns:
            The losses, each of shape [1], on the rank of the last stage; elsewhere nothing.
        """
        rank, rank_of = dist.get_rank(self._group), self._set.rank_of
        sends: list[tuple[torch.Tensor, Any]] = []
        passed_on: dict[tuple[int, int], Tensors] = {}
        losses: list[torch.Tensor] = []
        for stage in self._set.stages:
            for micro_batch in range(num_micro_batches):
                crossing = all_ranges[stage.number].received
                received = passed_on.pop((stage.number, micro_batch), ())
                if crossing is not None and rank_of[stage.number - 1] != rank:
                    received = _receive(crossing, rank_of[stage.number - 1], self._group, self._device)
                output = stage(*received)
                if stage.is_last:
                    losses.append(output)
                elif rank_of[stage.number + 1] == rank:
                    passed_on[stage.number + 1, micro_batch] = output
                else:
                    sends += _send(output, rank_of[stage.number + 1], self._group)
        for _, work in sends:
            work.wait()
        return losses

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Makes all ranks of the pipeline fail if one does, each with the reason.

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
            if own:
                self._notes.note_own(cause, stages)
            else:
                self._notes.note_lost()
            tear_down(group, error, self._release_group)
            del group
            try:
                if own:
                    self._notes.raise_own(cause, stages)
                self._notes.raise_lost(cause)
            except AtorchError as reason:
                self._failed = str(reason)
                raise

    def _is_own(self, error: Exception) -> bool:
        """Whether the error comes from this rank's part of the model, not from the connection to another."""
        if any(stage.failed for stage in self._set.stages) or not isinstance(error, RuntimeError):
            return True
        return isinstance(error, AtorchError) or "[Stage" in str(error)

    def _release_group(self) -> None:
        del self._group
        self._schedules.clear()
        for stage in self._made:
            stage.group = None
        self._made.clear()

    def _everywhere(self, losses: Sequence[torch.Tensor], divisor: int) -> torch.Tensor:
        """The sum of the last stage's losses divided by ``divisor``, on every rank."""
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
    """The weights' part of a backward pass that has computed all gradients already."""
    return lambda: None


def _passed_through(loss: torch.Tensor, _: Any) -> torch.Tensor:
    """The loss function for torch's schedules: the last stage has computed the loss."""
    return loss


def _example(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)
