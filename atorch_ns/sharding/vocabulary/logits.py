"""Divided logits, of which each rank holds a part of the vocabulary, and cross-entropy computed on the parts.

Per row, cross-entropy needs three numbers of all ranks: the largest logit, the sum of exponentials, and the
target's logit. ``torch.distributed.tensor.parallel.loss_parallel`` computes the same on DTensors. It is not
used: it needs the backward pass, which belongs to the user's loop, inside its context; it holds four tensors
of a part's size there, not two; it fails with class weights and ignored targets (torch 2.13).

Legend: B batch, T tokens, N rows, V vocabulary, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from atorch_ns.sharding.collectives import Group, SimulatedGroup, maximum, total
from atorch_ns.sharding.divided_tensor import DividedTensor, LogitUses, LossCall, on_whole
from atorch_ns.sharding.rank_context import TensorGroup
from atorch_ns.sharding.vocabulary import dispatch
from atorch_ns.torch_compat import tensor_without_storage

# Exponentials are summed for an eighth of the rows at a time, since all of them are as large as the logits.
_PIECES = 8


def cross_entropy_on_parts(
    part: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, call: LossCall, *, group: Group
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of the whole logits, the same on every rank. Collective.

    Args:
        part: this rank's [N, V / n], [V / n] or [N, V / n, …].
        target: class indices of the whole vocabulary, the same on every rank.
        weight: weights of the classes, [V].
        group: the ranks, in the order of their parts.

    Raises:
        ValueError: if the reduction is unknown, or the targets do not fit the logits.
        IndexError: if a target is not a class, on the CPU.
    """
    if call.reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{call.reduction} is not a valid value for reduction")
    shape = tuple(size for axis, size in enumerate(part.shape) if axis != call.dim)
    if tuple(target.shape) != shape:
        raise ValueError(f"Expected target size {list(shape)}, got {list(target.shape)}")
    _check_targets(target, call)
    if torch.is_autocast_enabled(part.device.type):  # autocast computes cross_entropy in fp32
        part = part.float()
    rows = part.movedim(call.dim, -1).reshape(-1, part.shape[call.dim])  # [N, V / n]
    flat = target.reshape(-1).long()  # [N]
    with torch.autocast(part.device.type, enabled=False):
        losses: torch.Tensor = _OnParts.apply(rows, flat, call, group)  # type: ignore[no-untyped-call]
        loss = _reduce_losses(losses, flat, weight, call).to(part.dtype)
    return loss.view(shape) if call.reduction == "none" else loss


def _check_targets(target: torch.Tensor, call: LossCall) -> None:
    # torch checks the targets of whole logits. On parts a wrong target lies on no rank, and no rank notices.
    if target.device.type != "cpu" or not target.numel():
        return  # elsewhere a look at values would make the host wait
    wrong = (target != call.ignore_index) & ((target < 0) | (target >= call.shape[call.dim]))
    if wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


def _reduce_losses(
    losses: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, call: LossCall
) -> torch.Tensor:
    valid = target != call.ignore_index
    weights = valid.to(losses.dtype)  # [N], 0 for ignored targets, as losses are
    if weight is not None:
        weights = weights * weight.to(losses.dtype)[target.masked_fill(~valid, 0)]
        losses = losses * weights
    if call.reduction == "none":
        return losses
    # As in torch, a mean divides by the weights of the targets that count, not by N.
    return losses.sum() / weights.sum() if call.reduction == "mean" else losses.sum()


class _OnParts(torch.autograd.Function):
    """[N, V / n] and [N] to the losses [N] of the rows, in fp32 where the logits are in half precision."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, target: torch.Tensor, call: LossCall, group: Group
    ) -> torch.Tensor:
        is_ignored = target == call.ignore_index  # [N]
        local = target - group.rank() * rows.shape[1]  # [N], the class counted from this part's first
        inside = (local >= 0) & (local < rows.shape[1]) & ~is_ignored  # whether this rank has its logit
        local = local.masked_fill(~inside, 0).unsqueeze(1)  # some valid index: masked again below
        dtype = torch.promote_types(rows.dtype, torch.float32)
        largest = maximum(rows.amax(1).to(dtype), group)  # [N], over all ranks
        logs = rows - largest.unsqueeze(1)  # in dtype
        pieces = logs.split(max(1, -(-len(logs) // _PIECES)))
        # [N], the target's logit less the largest; 0 on ranks that do not hold it, since ranks are summed.
        scores = logs.gather(1, local).squeeze(1).masked_fill(~inside, 0)
        if call.smoothing:
            # The target is 1 - s of its own class and s / V of every class.
            scores = (1 - call.smoothing) * scores + call.smoothing / call.shape[call.dim] * logs.sum(1)
        # [2, N]: sums of exponentials and scores of all ranks, in one all-reduce.
        sums = total(torch.stack([torch.cat([piece.exp().sum(1) for piece in pieces]), scores]), group)
        log_sum = sums[0].log()
        ctx.call = call
        # Kept: log-probabilities, in the memory of `logs` where the dtype is the same.
        ctx.save_for_backward(logs.sub_(log_sum.unsqueeze(1)).to(rows.dtype), local, inside, is_ignored)
        return (log_sum - sums[1]).masked_fill(is_ignored, 0)  # [N], -log softmax at the target

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of a row is its probabilities less those of the target."""
        logs, local, inside, is_ignored = ctx.saved_tensors
        above = gradients[0].masked_fill(is_ignored, 0).to(logs.dtype)  # [N]
        grad_rows = logs.exp().mul_(above.unsqueeze(1))  # [N, V / n]
        call: LossCall = ctx.call
        if call.smoothing:
            grad_rows.sub_((above * (call.smoothing / call.shape[call.dim])).unsqueeze(1))
        at_target = (above * (call.smoothing - 1)).masked_fill(~inside, 0)
        grad_rows.scatter_add_(1, local, at_target.unsqueeze(1))
        return grad_rows, None, None, None


class DividedLogits(DividedTensor):
    """A tensor that looks like the whole logits […, V] and holds this rank's […, V / n].

    Slices and views that leave the vocabulary alone, casts and products with numbers stay divided.
    Cross-entropy of ``torch.nn.functional`` is computed on the parts. Anything else gathers the whole.
    """

    part_name = "a part of the vocabulary"
    method = "tensor_parallel"

    _dim: int
    _group: TensorGroup

    @staticmethod
    def of(
        part: torch.Tensor, group: TensorGroup, *, dim: int = -1, uses: LogitUses | None = None
    ) -> DividedLogits:
        """Logits whose part on this rank is ``part``, divided along ``dim``."""
        dim %= part.dim()
        logits: DividedLogits = _Joined.apply(part, dim, group)  # type: ignore[no-untyped-call]
        logits._part, logits._dim, logits._group, logits._uses, logits._wholes = part, dim, group, uses, {}
        return logits

    def _gather_whole(self) -> torch.Tensor:
        return self._group.gather(self._part, self._dim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DividedLogits(this rank's {self._part!r}, divided along {self._dim} by {self._group.size})"

    def of_rank(
        self, whole: torch.Tensor, group: Group, uses: LogitUses
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
        """See :class:`DividedTensor`."""
        assert isinstance(group, SimulatedGroup)

        def shard(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(group.size(), self._dim)[group.rank()].contiguous()

        tp_group = TensorGroup(group)
        return shard(whole), shard, lambda part: DividedLogits.of(part, tp_group, dim=self._dim, uses=uses)

    @classmethod
    def _on_parts(
        cls, tensor: DividedLogits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not args or args[0] is not tensor:  # another operand is divided, or it is a keyword
            return NotImplemented
        if func is F.cross_entropy:
            return tensor._cross_entropy(*args[1:], **kwargs)
        result = dispatch.apply_to_part(
            func, tensor._part, tensor._dim, tensor._group.size, args=args[1:], kwargs=kwargs
        )
        return NotImplemented if result is None else result.joined(tensor._wrap_part)

    def _wrap_part(self, part: torch.Tensor, dim: int) -> DividedLogits:
        return DividedLogits.of(part, self._group, dim=dim, uses=self._uses)

    def _cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        legacy = size_average is not None or reduce is not None  # deprecated arguments of torch
        why = _needs_whole(self, target, weight, legacy, label_smoothing=label_smoothing)
        if why is not None:
            if legacy:
                options |= {"size_average": size_average, "reduce": reduce}
            loss: torch.Tensor = on_whole(F.cross_entropy, (self, target, weight), options, why)
            return loss
        call = LossCall(
            tuple(self.shape), self._dim, ignore_index, reduction, weight is not None, label_smoothing
        )
        if self._uses is not None:
            self._uses.losses.append(call)
        if self._group.process_group is None:  # a study without ranks, of shapes alone
            whole: torch.Tensor = F.cross_entropy(self.whole(), target, weight, **options)
            return whole
        return cross_entropy_on_parts(self._part, target, weight, call, group=self._group.process_group)


class _Joined(torch.autograd.Function):
    """A part presented as the whole, also to users' autograd functions."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        shape = [size * group.size if axis == dim else size for axis, size in enumerate(part.shape)]
        logits: torch.Tensor = tensor_without_storage(DividedLogits, part, shape)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The gradient of the whole is the same on all ranks, and each takes its piece.
        return gradients[0].chunk(ctx.group.size, ctx.dim)[ctx.group.rank], None, None


def _needs_whole(
    logits: DividedLogits, target: Any, weight: Any, legacy: bool, *, label_smoothing: float
) -> str | None:
    # A reason, or None. With smoothing torch weights the term of every class, which the parts do not compute.
    if label_smoothing and weight is not None:
        return "cross_entropy with label smoothing and weights"
    if legacy:
        return "cross_entropy with size_average or reduce"
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return "cross_entropy with class probabilities"
    if weight is not None and weight.requires_grad:
        return "cross_entropy with weights that are trained"
    if logits._dim != (1 if logits.dim() > 1 else 0):  # where cross_entropy has its classes
        return "cross_entropy over another dimension than the vocabulary"
    return None
