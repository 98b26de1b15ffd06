"""Pipeline runner: runs batches through the stages of a rank, and ends all ranks if one fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.cluster import receive_nest, send_nest
from atorch_ns.data import Passed, StepWork
from atorch_ns.errors import AtorchError, StepError
from atorch_ns.pipeline.cut.graph import CallGraph
from atorch_ns.pipeline.cut.install import ranges
from atorch_ns.pipeline.run.executor import Execution, Links, Timed
from atorch_ns.pipeline.run.failure import FailureNotes, tear_down
from atorch_ns.pipeline.run.forward_pass import StageRange
from atorch_ns.pipeline.run.stage import LossOf, StageModule
from atorch_ns.pipeline.schedule.actions import Orders, forward_only

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors of a micro-batch."""


def signature(batch: Any) -> Signature:
    """The shapes and dtypes of a batch, which determine those of all tensors that cross cuts."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch))


class StageSet:
    """The stages of one rank.

    Args:
        stages: the stages, in the order of the model.
        cuts: the calls before which the model is cut.
        rank_of: the rank along the pipeline of every stage.
        paths: the paths of the units, in the order of their calls when the model was cut.
        trace: ``(micro-batch, outputs wanted, thawed parameters) -> graph``, called once per set of shapes.
        draw_seed: returns a seed for the next batch, the same on all stages of a pipeline.
        find_thawed: names parameters that were frozen at the cut and are trained now on any rank. Collective.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        cuts: Sequence[int],
        rank_of: Sequence[int],
        paths: Sequence[str],
        *,
        trace: Callable[[Any, bool, frozenset[str]], CallGraph],
        draw_seed: Callable[[], int],
        find_thawed: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self.stages = tuple(stages)
        self.rank_of = tuple(rank_of)
        self._cuts = tuple(cuts)
        self.paths = tuple(paths)
        self._trace = trace
        self._draw_seed = draw_seed
        self._find_thawed = find_thawed
        self._graphs: dict[
            tuple[Signature, bool, frozenset[str]], tuple[CallGraph, tuple[StageRange, ...]]
        ] = {}

    def begin(
        self, micro_batches: Sequence[Any], loss_of: LossOf, *, outputs: bool = False
    ) -> list[tuple[StageRange, ...]]:
        """Prepares every stage for one forward pass of each micro-batch.

        Args:
            micro_batches: the same on all ranks of the pipeline.
            loss_of: ``(micro-batch, output) -> loss``, 0-d.
            outputs: whether the last stage returns all outputs of the model, or only those for the loss.

        Returns:
            All stages of the pipeline for the shapes of each micro-batch.

        Raises:
            StepError: if the model calls other units now than when it was cut.
        """
        thaw_names = self._find_thawed()
        traces = [self._trace_micro_batch(micro_batch, outputs, thaw_names) for micro_batch in micro_batches]
        # An evaluation leaves the masks to come alone.
        draws = any(stage.model_training for stage in self.stages)
        seed = self._draw_seed() if draws else 0
        for stage in self.stages:
            passes = [(graph, stages[stage.number]) for graph, stages in traces]
            stage.begin(micro_batches, passes, loss_of, seed=seed)
        return [stages for _, stages in traces]

    def finish(self) -> None:
        """Releases the batch."""
        for stage in self.stages:
            stage.finish()

    def _trace_micro_batch(
        self, micro_batch: Any, outputs: bool, thaw_names: frozenset[str]
    ) -> tuple[CallGraph, tuple[StageRange, ...]]:
        key = (signature(micro_batch), outputs, thaw_names)
        if key not in self._graphs:
            with torch.enable_grad():  # also where an evaluation is the first to have such shapes
                graph = self._trace(micro_batch, outputs, thaw_names)
            if graph.paths != self.paths:
                raise StepError(_other_calls(self.paths, graph.paths))
            stages = ranges(graph, self._cuts)
            pieces = next((stage.pieces for stage in self.stages), None)  # one for all stages
            self._graphs[key] = (graph, stages if pieces is None else tuple(map(pieces.of, stages)))
        return self._graphs[key]


def _other_calls(before: Sequence[str], now: Sequence[str]) -> str:
    index = next(
        (i for i, (path, other) in enumerate(zip(before, now, strict=False)) if path != other),
        min(len(before), len(now)),
    )
    was, is_ = (paths[index] if index < len(paths) else "nothing" for paths in (before, now))
    return (
        f"for this batch the model calls {is_} where it called {was} when it was cut into stages. In a pipeline the "
        "calls must be the same for every batch."
    )


class PipelineRunner:
    """Runs micro-batches forward and backward through the stages of a pipeline.

    Every rank of the pipeline has the whole micro-batches, so only crossing tensors are sent.

    Args:
        links: this rank's connections, torn down when a step fails.
        orders: ``number of micro-batches -> the actions of all ranks``.
        loss_of: ``(micro-batch, output) -> loss``, 0-d.
        keeping: context in which forward passes keep activations instead of recomputing them.
        kept: stages that recompute nothing.
        whole_backward: whether input and weight gradients are computed together under any schedule.

    Attributes:
        timeline: this rank's actions in the last step, with their times.
    """

    def __init__(
        self,
        stage_set: StageSet,
        orders: Callable[[int], Orders],
        *,
        links: Links,
        device: torch.device,
        loss_of: Callable[[Any, Any], torch.Tensor],
        keeping: Callable[[], AbstractContextManager[object]] = nullcontext,
        kept: Collection[int] = (),
        whole_backward: bool = False,
    ) -> None:
        self._set = stage_set
        self._orders = cache(orders)  # by the number of micro-batches
        self._links = links
        self._device = device
        self._loss_of = loss_of
        self.timeline: Sequence[Timed] = ()
        self._keeping, self._kept_stages = keeping, kept
        self._whole_backward = whole_backward
        self._notes = FailureNotes(links.up)
        self._failure = ""

    def forward_backward(self, work: StepWork) -> Passed:
        """Adds the gradients of the shares of all losses. Collective over the pipeline."""
        return self._run_orders(work, self._orders(len(work.micro_batches)))

    @torch.no_grad()
    def forward(self, work: StepWork) -> Passed:
        """The losses and outputs without gradients. Collective over the pipeline."""
        return self._run_orders(work, forward_only(self._set.rank_of, len(work.micro_batches)))

    def _run_orders(self, work: StepWork, orders: Orders) -> Passed:
        with self._share_failure():
            return self._execute_orders(work, orders)

    def _execute_orders(self, work: StepWork, orders: Orders) -> Passed:
        losses = torch.zeros(len(work.micro_batches), device=self._device)
        ranks = dist.get_process_group_ranks(self._links.up)
        askers = [index for index, rank in enumerate(ranks) if rank in work.askers]
        outputs: dict[int, Any] = {}

        def share_of(number: int, micro_batch: Any, output: Any) -> torch.Tensor:
            loss = self._loss_of(micro_batch, output)
            if number not in work.dummies:  # they keep ranks in step and count nothing
                losses[number] = loss.detach()
                if askers:
                    outputs[number] = map_tensors(torch.Tensor.detach, output)
            return work.share(number, loss)

        execution = Execution(
            links=self._links,
            device=self._device,
            orders=orders,
            rank_of=self._set.rank_of,
            stages={stage.number: stage for stage in self._set.stages},
            ranges=self._set.begin(work.micro_batches, share_of, outputs=bool(askers)),
            keeping=self._keeping,
            kept=self._kept_stages,
            idle=work.dummies,
            whole_backward=self._whole_backward,
        )
        self.timeline = execution.timeline
        try:
            execution.run()
        finally:
            self._set.finish()
        dist.broadcast(losses, group=self._links.up, group_src=self._set.rank_of[-1])
        results = self._exchange_outputs(tuple(outputs[number] for number in sorted(outputs)), askers)
        return Passed(losses=losses, outputs=results if work.wants_outputs else ())

    def _exchange_outputs(self, outputs: tuple[Any, ...], askers: Collection[int]) -> tuple[Any, ...]:
        links, last = self._links, self._set.rank_of[-1]
        if links.rank == last:  # the only one that has outputs
            for target in askers:
                if target != last:
                    send_nest(outputs, group=links.between(last, target), target=target, device=self._device)
        elif links.rank in askers:
            group = links.between(last, links.rank)
            outputs = receive_nest(group=group, source=last, device=self._device)
        return outputs

    @contextmanager
    def _share_failure(self) -> Iterator[None]:
        """Makes all ranks of the pipeline fail with the reason if one fails."""
        if self._failure:
            raise StepError(
                f"this pipeline has stopped: {self._failure.rstrip('.')}. Restart the job from a checkpoint."
            )
        try:
            yield
        except Exception as error:
            groups, stages = [self._links.up, self._links.down], [stage.number for stage in self._set.stages]
            # The note is written first: when the connections close, the other ranks read the notes at once.
            is_local = self._is_own(error)
            if is_local:
                self._notes.note_own(error, stages)
            else:
                self._notes.note_lost()
            tear_down(groups, error, self._release_links)
            try:
                if is_local:
                    self._notes.raise_own(error, stages)
                self._notes.raise_lost(error)
            except AtorchError as reason:
                self._failure = str(reason)
                raise

    def _is_own(self, error: Exception) -> bool:
        # A lost connection is a RuntimeError of torch.distributed. A stage marks the errors of its own code.
        has_failed = any(stage.failed for stage in self._set.stages)
        return has_failed or isinstance(error, AtorchError) or not isinstance(error, RuntimeError)

    def _release_links(self) -> None:
        del self._links  # gloo closes a group when the last reference to it goes
