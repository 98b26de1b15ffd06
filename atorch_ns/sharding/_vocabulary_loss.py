"""Cross-entropy on logits of which each rank holds a part of the vocabulary.

Each row needs three numbers of all ranks: the largest logit, the sum of exponentials, and the target's logit.
``torch.distributed.tensor.parallel.loss_parallel`` computes the same on DTensors. It is not used, because it wants the
backward pass, which belongs to the user's loop, inside its context; holds four tensors of the size of a part in the
backward pass where two will do; and fails with class weights and ignored targets (torch 2.13).

Legend: N rows, V vocabulary, n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LossCall", "cross_entropy_on_parts"]

_PIECES = 8
"""Exponentials are summed for an eighth of the rows at a time, since all of them are as large as the logits."""


@dataclass(frozen=True)
class LossCall:
    """A cross-entropy of divided logits.

    Attributes:
        shape: of the whole logits.
        dim: of the vocabulary.
        ignore_index: the target that is left out.
        reduction: none, mean or sum.
        weighted: whether classes have weights.
        smoothing: share of the target that is spread over all classes; 0 where classes have weights.
    """

    shape: tuple[int, ...]
    dim: int
    ignore_index: int
    reduction: str
    weighted: bool
    smoothing: float = 0.0


def cross_entropy_on_parts(
    part: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    call: LossCall,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of the whole logits, the same on every rank; collective.

    Args:
        part: this rank's [N, V / n], [V / n] or [N, V / n, …].
        target: class indices of the whole vocabulary, the same on every rank.
        weight: of the classes, [V].
        call: the rest.
        group: the ranks, in the order of their parts.

    Raises:
        ValueError: if the reduction is unknown, or the targets do not fit the logits.
        IndexError: if a target is no class, on the CPU.
    """
    if call.reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{call.reduction} is not a valid value for reduction")
    wanted = tuple(size for place, size in enumerate(part.shape) if place != call.dim)
    if tuple(target.shape) != wanted:
        raise ValueError(f"Expected target size {list(wanted)}, got {list(target.shape)}")
    _check_targets(target, call)
    if torch.is_autocast_enabled(part.device.type):
        part = part.float()
    rows = part.movedim(call.dim, -1).reshape(-1, part.shape[call.dim])
    flat = target.reshape(-1).long()
    with torch.autocast(part.device.type, enabled=False):
        losses: torch.Tensor = _OnParts.apply(rows, flat, call, group)  # type: ignore[no-untyped-call]
        found = _reduced(losses, flat, weight, call).to(part.dtype)
    return found.view(wanted) if call.reduction == "none" else found


def _check_targets(target: torch.Tensor, call: LossCall) -> None:
    """torch refuses such targets in a whole loss; on parts they would be the target of no rank."""
    if target.device.type != "cpu" or not target.numel():
        return  # elsewhere a look at values would make the host wait
    wrong = (target != call.ignore_index) & ((target < 0) | (target >= call.shape[call.dim]))
    if wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


def _reduced(
    losses: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, call: LossCall
) -> torch.Tensor:
    """[N] losses, those of ignored targets 0, with the weights of their classes and reduced."""
    counted = target != call.ignore_index
    weights = counted.to(losses.dtype)
    if weight is not None:
        weights = weights * weight.to(losses.dtype)[target.masked_fill(~counted, 0)]
        losses = losses * weights
    if call.reduction == "none":
        return losses
    return losses.sum() / weights.sum() if call.reduction == "mean" else losses.sum()


class _OnParts(torch.autograd.Function):
    """[N, V / n] and [N] to the losses [N] of the rows, in fp32 where the logits are in half precision."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, target: torch.Tensor, call: LossCall, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ignored = target == call.ignore_index
        local = target - group.rank() * rows.shape[1]
        inside = (local >= 0) & (local < rows.shape[1]) & ~ignored
        local = local.masked_fill(~inside, 0).unsqueeze(1)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        largest = rows.amax(1).to(dtype)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logs = rows - largest.unsqueeze(1)  # in dtype
        pieces = logs.split(max(1, -(-len(logs) // _PIECES)))
        own = logs.gather(1, local).squeeze(1).masked_fill(~inside, 0)
        if call.smoothing:
            own = (1 - call.smoothing) * own + call.smoothing / call.shape[call.dim] * logs.sum(1)
        sums = torch.stack([torch.cat([piece.exp().sum(1) for piece in pieces]), own])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        ctx.call = call
        ctx.save_for_backward(logs.sub_(log_sum.unsqueeze(1)).to(rows.dtype), local, inside, ignored)
        return (log_sum - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of a row is its probabilities less those of the target."""
        logs, local, inside, ignored = ctx.saved_tensors
        above = gradients[0].masked_fill(ignored, 0).to(logs.dtype)
        found = logs.exp().mul_(above.unsqueeze(1))
        call: LossCall = ctx.call
        if call.smoothing:
            found.sub_((above * (call.smoothing / call.shape[call.dim])).unsqueeze(1))
        at_target = (above * (call.smoothing - 1)).masked_fill(~inside, 0)
        found.scatter_add_(1, local, at_target.unsqueeze(1))
        return found, None, None, None
