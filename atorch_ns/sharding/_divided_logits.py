"""Logits of which each rank holds a part of the vocabulary.

Legend: B batch, T tokens, V vocabulary, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from atorch_ns.errors import StepError
from atorch_ns.profile._batches import map_batch
from atorch_ns.sharding import _divided_views as views
from atorch_ns.sharding._tensor_region import Division
from atorch_ns.sharding._vocabulary_loss import LossCall, cross_entropy_on_parts
from atorch_ns.torch_compat import tensor_without_storage

__all__ = ["DividedLogits", "LogitUses", "whole_logits"]


@dataclass
class LogitUses:
    """What has been done with divided logits.

    Attributes:
        losses: the cross-entropies computed on the parts.
        gathered: what needed the whole logits, in words, by the function's name.
        changed: functions that would have changed them in place.
    """

    losses: list[LossCall] = field(default_factory=list)
    gathered: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)


class DividedLogits(torch.Tensor):
    """Looks like the whole logits […, V] and holds this rank's […, V / n].

    Slices and views that leave the vocabulary alone, casts and products with numbers stay divided;
    ``torch.nn.functional.cross_entropy`` is computed on the parts; anything else gathers the whole logits first, which
    all ranks of the group must do together. Changes in place are refused.
    """

    _part: torch.Tensor
    _dim: int
    _division: Division
    _uses: LogitUses | None
    _wholes: dict[bool, torch.Tensor]

    @staticmethod
    def of(
        part: torch.Tensor, division: Division, *, dim: int = -1, uses: LogitUses | None = None
    ) -> DividedLogits:
        """Logits whose part on this rank is ``part``, divided along ``dim``."""
        dim %= part.dim()
        made: DividedLogits = _Joined.apply(part, dim, division)  # type: ignore[no-untyped-call]
        made._part, made._dim, made._division, made._uses, made._wholes = part, dim, division, uses, {}
        return made

    def whole(self) -> torch.Tensor:
        """The whole logits, a plain tensor; collective the first time."""
        graph = torch.is_grad_enabled()
        if graph not in self._wholes:
            self._wholes[graph] = self._division.gather(self._part, self._dim)
        return self._wholes[graph]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DividedLogits(this rank's {self._part!r}, divided along {self._dim} by {self._division.degree})"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in views.ABOUT:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        logits = args[0] if args else None
        if isinstance(logits, DividedLogits):
            if func in views.OF_PART:
                return func(logits._part, *args[1:], **kwargs)
            if func is F.cross_entropy:
                return logits._cross_entropy(*args[1:], **kwargs)
            kept = views.kept_divided(
                func, logits._part, logits._dim, logits._division.degree, args[1:], kwargs
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
        """Reached by code in C++ alone, which cannot gather."""
        raise StepError(
            f"{func} was given logits of which each rank holds a part of the vocabulary, from code that torch does not "
            "let take another course. Set parallel_loss=False in the config of tensor_parallel."
        )

    def _like(self, part: torch.Tensor, dim: int) -> DividedLogits:
        return DividedLogits.of(part, self._division, dim=dim, uses=self._uses)

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
        """As ``torch.nn.functional.cross_entropy``."""
        legacy = size_average is not None or reduce is not None
        why = _needs_whole(self, target, weight, legacy, label_smoothing)
        if why is not None:
            options: dict[str, Any] = {"size_average": size_average, "reduce": reduce} if legacy else {}
            options |= {
                "ignore_index": ignore_index,
                "reduction": reduction,
                "label_smoothing": label_smoothing,
            }
            gathered: torch.Tensor = _on_whole(F.cross_entropy, (self, target, weight), options, why)
            return gathered
        call = LossCall(
            tuple(self.shape), self._dim, ignore_index, reduction, weight is not None, label_smoothing
        )
        if self._uses is not None:
            self._uses.losses.append(call)
        if self._division.group is None:
            whole: torch.Tensor = F.cross_entropy(
                self.whole(),
                target,
                weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )
            return whole
        return cross_entropy_on_parts(self._part, target, weight, call, self._division.group)


class _Joined(torch.autograd.Function):
    """A part as the whole, for autograd functions that others write: the gradient of the whole is the same on all
    ranks, and each takes its piece."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, division: Division) -> torch.Tensor:
        ctx.dim, ctx.division = dim, division
        shape = [size * division.degree if place == dim else size for place, size in enumerate(part.shape)]
        made: torch.Tensor = tensor_without_storage(DividedLogits, part, shape)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0].chunk(ctx.division.degree, ctx.dim)[ctx.division.rank], None, None


def whole_logits(data: Any) -> Any:
    """``data`` with the whole logits where it has divided ones; collective where it has any."""
    found: list[DividedLogits] = []

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DividedLogits):
            found.append(tensor)
            return tensor.whole()
        return tensor

    made = map_batch(gathered, data)
    return made if found else data


def _needs_whole(
    logits: DividedLogits, target: Any, weight: Any, legacy: bool, label_smoothing: float
) -> str | None:
    """Why a cross-entropy is not computed on the parts."""
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
            "torch.autograd.grad was asked for the gradient of logits of which each rank holds a part of the vocabulary. "
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
    changes = views.changes_in_place(func, args, kwargs)

    def gathered(value: Any) -> Any:
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

    return func(*_each(gathered, args), **_each(gathered, dict(kwargs)))


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """A nest of arguments with ``function`` applied to what it holds."""
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_each(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _each(function, item) for key, item in value.items()}
    return function(value)
