"""The stages of one rank, made ready for batches of any shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from atorch_ns.errors import StepError
from atorch_ns.pipeline._division import ranges
from atorch_ns.pipeline._graph import CallGraph
from atorch_ns.pipeline._nests import leaves
from atorch_ns.pipeline._pass import StageRange
from atorch_ns.pipeline._split import backward_splits
from atorch_ns.pipeline._stage import LossOf, StageModule

__all__ = ["Signature", "StageSet", "signature"]

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors of a micro-batch."""


def signature(batch: Any) -> Signature:
    """What decides the shapes of all that crosses cuts."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in leaves(batch))


class StageSet:
    """The stages of one rank.

    Args:
        stages: in the order of the model.
        cuts: where the model is cut, by call.
        rank_of: the rank along the pipeline of every stage.
        paths: of the units, in the order in which they were called when the model was cut.
        trace: ``micro-batch -> its graph``; asked once for micro-batches of the same shapes.
        draw_seed: gives a seed for the next batch, the same on all stages of a pipeline.
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
        """Whether a stage's gradients of inputs and of weights can be computed apart for such micro-batches."""
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
        """Lets go of the batch."""
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
