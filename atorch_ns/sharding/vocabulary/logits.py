"""Divided logits, of which each rank holds a part of the vocabulary, and cross-entropy computed on the parts.

For cross-entropy each row needs three numbers of all ranks: the largest logit, the sum of exponentials, and the target's logit.
``torch.distributed.tensor.parallel.loss_parallel`` computes the same on DTensors. It is not used, because it needs the
backward pass, which belongs to the user's loop, inside its context; holds four tensors of the size of a part in the
backward pass where two will do; and fails with class weights and ignored targets (torch 2.13).

Legend: B batch, T tokens, N rows, V vocabulary, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from atorch_ns.capture.nests import map_tensors
from atorch_ns.capture.operators import METADATA
from atorch_ns.errors import StepError
from atorch_ns.sharding.collectives import Group, maximum, total
from atorch_ns.sharding.rank_context import TensorGroup
from atorch_ns.sharding.vocabulary import dispatch
from atorch_ns.torch_compat import tensor_without_storage

_PIECES = 8
"""Exponentials are summed for an eighth of the rows at a time, since all of them are as large as the logits."""


@dataclass(frozen=True)
class LossCall:
    """A cross-entropy of divided logits.

    Attributes:
        shape: the shape of the whole logits.
        dim: the dimension of the vocabulary.
        ignore_index: the target that is left out.
        reduction: none, mean or sum.
        weighted: whether classes have weights.
        smoothing: the share of the target that is spread over all classes; 0 where classes have weights.
    """

    shape: tuple[int, ...]
    dim: int
    ignore_index: int
    reduction: str
    weighted: bool
    smoothing: float = 0.0


def cross_entropy_on_parts(
    part: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, call: LossCall, group: Group
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of the whole logits, the same on every rank; collective.

    Args:
        part: this rank's [N, V / n], [V / n] or [N, V / n, …].
        target: class indices of the whole vocabulary, the same on every rank.
        weight: weights of the classes, [V].
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
    """Raises for targets outside the vocabulary, as torch does for whole logits; on parts no rank would notice."""
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
        ctx: Any, rows: torch.Tensor, target: torch.Tensor, call: LossCall, group: Group
    ) -> torch.Tensor:
        ignored = target == call.ignore_index
        local = target - group.rank() * rows.shape[1]
        inside = (local >= 0) & (local < rows.shape[1]) & ~ignored
        local = local.masked_fill(~inside, 0).unsqueeze(1)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        largest = maximum(rows.amax(1).to(dtype), group)
        logs = rows - largest.unsqueeze(1)  # in dtype
        pieces = logs.split(max(1, -(-len(logs) // _PIECES)))
        own = logs.gather(1, local).squeeze(1).masked_fill(~inside, 0)
        if call.smoothing:
            own = (1 - call.smoothing) * own + call.smoothing / call.shape[call.dim] * logs.sum(1)
        sums = total(torch.stack([torch.cat([piece.exp().sum(1) for piece in pieces]), own]), group)
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


@dataclass
class LogitUses:
    """A record of the operations on divided logits.

    Attributes:
        losses: the cross-entropies computed on the parts.
        gathered: descriptions of what needed the whole logits, by the function's name.
        changed: names of functions that would have changed them in place.
    """

    losses: list[LossCall] = field(default_factory=list)
    gathered: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)


class DividedLogits(torch.Tensor):
    """A tensor that looks like the whole logits […, V] and holds this rank's […, V / n].

    Slices and views that leave the vocabulary alone, casts and products with numbers stay divided;
    ``torch.nn.functional.cross_entropy`` is computed on the parts; anything else gathers the whole logits first, which
    all ranks of the group must do together. Changes in place are refused.
    """

    _part: torch.Tensor
    _dim: int
    _group: TensorGroup
    _uses: LogitUses | None
    _wholes: dict[bool, torch.Tensor]

    @staticmethod
    def of(
        part: torch.Tensor, group: TensorGroup, *, dim: int = -1, uses: LogitUses | None = None
    ) -> DividedLogits:
        """Logits whose part on this rank is ``part``, divided along ``dim``."""
        dim %= part.dim()
        made: DividedLogits = _Joined.apply(part, dim, group)  # type: ignore[no-untyped-call]
        made._part, made._dim, made._group, made._uses, made._wholes = part, dim, group, uses, {}
        return made

    def whole(self) -> torch.Tensor:
        """The whole logits, a plain tensor; collective the first time."""
        graph = torch.is_grad_enabled()
        if graph not in self._wholes:
            self._wholes[graph] = self._group.gather(self._part, self._dim)
        return self._wholes[graph]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DividedLogits(this rank's {self._part!r}, divided along {self._dim} by {self._group.size})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        logits = args[0] if args else None
        if isinstance(logits, DividedLogits):
            if func in dispatch.AUTOGRAD:
                return func(logits._part, *args[1:], **kwargs)
            if func is F.cross_entropy:
                return logits._cross_entropy(*args[1:], **kwargs)
            kept = dispatch.apply_to_part(
                func, logits._part, logits._dim, logits._group.size, args[1:], kwargs
            )
            if kept is not None:
                return kept.joined(logits._like)
        if func is torch.autograd.grad:
            _refuse_gradient(kwargs.get("inputs", args[1] if len(args) > 1 else ()))
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Reached only from C++ code, where gathering is not possible."""
        raise StepError(
            f"{func} was given logits of which each rank holds a part of the vocabulary, from code that torch does not "
            "let us intercept. Set parallel_loss=False in the config of tensor_parallel."
        )

    def _like(self, part: torch.Tensor, dim: int) -> DividedLogits:
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
        """Same arguments and result as ``torch.nn.functional.cross_entropy``."""
        options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        legacy = size_average is not None or reduce is not None
        why = _needs_whole(self, target, weight, legacy, label_smoothing)
        if why is not None:
            if legacy:
                options |= {"size_average": size_average, "reduce": reduce}
            gathered: torch.Tensor = _on_whole(F.cross_entropy, (self, target, weight), options, why)
            return gathered
        call = LossCall(
            tuple(self.shape), self._dim, ignore_index, reduction, weight is not None, label_smoothing
        )
        if self._uses is not None:
            self._uses.losses.append(call)
        if self._group.process_group is None:
            whole: torch.Tensor = F.cross_entropy(self.whole(), target, weight, **options)
            return whole
        return cross_entropy_on_parts(self._part, target, weight, call, self._group.process_group)


class _Joined(torch.autograd.Function):
    """A part presented as the whole, also to users' autograd functions. The gradient of the whole is the same on all
    ranks, and each takes its piece."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        shape = [size * group.size if place == dim else size for place, size in enumerate(part.shape)]
        made: torch.Tensor = tensor_without_storage(DividedLogits, part, shape)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0].chunk(ctx.group.size, ctx.dim)[ctx.group.rank], None, None


def whole_logits(data: Any) -> Any:
    """``data`` with whole logits in place of divided ones; collective where there are any."""
    found: list[DividedLogits] = []

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DividedLogits):
            found.append(tensor)
            return tensor.whole()
        return tensor

    made = map_tensors(gathered, data)
    return made if found else data


def _needs_whole(
    logits: DividedLogits, target: Any, weight: Any, legacy: bool, label_smoothing: float
) -> str | None:
    """The reason why a cross-entropy cannot be computed on the parts; ``None`` if it can."""
    if label_smoothing and weight is not None:
        return "cross_entropy with label smoothing and weights"
    if legacy:
        return "cross_entropy with size_average or reduce"
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return "cross_entropy with class probabilities"
    if weight is not None and weight.requires_grad:
        return "cross_entropy with weights that are trained"
    if logits._dim != (1 if logits.dim() > 1 else 0):
        return "cross_entropy over another dimension than the vocabulary"
    return None


def _refuse_gradient(inputs: Any) -> None:
    """Raises for gradients of divided logits: the loss is computed on the parts, not on the whole logits."""
    for logits in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        if not isinstance(logits, DividedLogits):
            continue
        if logits._uses is not None:
            logits._uses.gathered.setdefault("grad", "torch.autograd.grad with regard to the logits")
        raise StepError(
            "torch.autograd.grad cannot give the gradient of logits of which each rank holds a part of the vocabulary. "
            "Set parallel_loss=False in the config of tensor_parallel."
        )


def _on_whole(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str = ""
) -> Any:
    """Calls ``func`` with the whole logits.

    Raises:
        StepError: if it would change them in place.
    """
    name = getattr(func, "__name__", str(func))
    changes = dispatch.changes_in_place(func, args, kwargs)

    def gathered(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DividedLogits):
            return value
        if value._uses is not None:
            value._uses.gathered.setdefault(name, why or name)
            if changes:
                value._uses.changed.append(name)
        if changes:
            raise StepError(
                f"{name} would change logits in place of which each rank holds a part of the vocabulary. Use its form "
                "that returns a new tensor, or set parallel_loss=False in the config of tensor_parallel."
            )
        return value.whole()

    return func(*map_tensors(gathered, args), **map_tensors(gathered, dict(kwargs)))
