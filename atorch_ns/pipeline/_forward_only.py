"""Forward passes alone through a pipeline, for losses without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.pipeline._crossing import Crossing
from atorch_ns.pipeline._pass import StageRange
from atorch_ns.pipeline._stage_set import StageSet

__all__ = ["run_forward"]

Tensors = tuple[torch.Tensor, ...]


@torch.no_grad()
def run_forward(
    stage_set: StageSet,
    all_ranges: Sequence[StageRange],
    num_micro_batches: int,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[torch.Tensor]:
    """Runs all micro-batches through each of this rank's stages, in the order of the model; collective.

    Args:
        stage_set: the stages, ready for the batch.
        all_ranges: of all stages.
        num_micro_batches: of the batch.
        group: the ranks of the pipeline.
        device: where tensors are received.

    Returns:
        The losses, each of shape [1], on the rank of the last stage; elsewhere nothing.
    """
    rank = dist.get_rank(group)
    rank_of = stage_set.rank_of
    sends: list[tuple[torch.Tensor, Any]] = []
    passed_on: dict[tuple[int, int], Tensors] = {}
    losses: list[torch.Tensor] = []
    for stage in stage_set.stages:
        for micro_batch in range(num_micro_batches):
            crossing = all_ranges[stage.number].received
            received = passed_on.pop((stage.number, micro_batch), ())
            if crossing is not None and rank_of[stage.number - 1] != rank:
                received = _receive(crossing, rank_of[stage.number - 1], group, device)
            output = stage(*received)
            if stage.is_last:
                losses.append(output)
            elif rank_of[stage.number + 1] == rank:
                passed_on[stage.number + 1, micro_batch] = output
            else:
                sends += _send(output, rank_of[stage.number + 1], group)
    for _, work in sends:
        work.wait()
    return losses


def _receive(crossing: Crossing, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensors:
    specs = [one.spec for one in crossing.carried]
    tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs)
    works = [dist.irecv(tensor, group=group, group_src=source) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()
    return tensors


def _send(tensors: Tensors, target: int, group: dist.ProcessGroup) -> list[tuple[torch.Tensor, Any]]:
    """A tensor must live until it has been sent, so each goes with its work."""
    return [(tensor, dist.isend(tensor, group=group, group_dst=target)) for tensor in tensors]
