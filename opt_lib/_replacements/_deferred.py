"""Logits that are not computed yet, and the loss that takes them so.

Legend: B samples, T tokens, N tokens of all samples, D features, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from opt_lib._replacements import _kernels

__all__ = ["CHUNK_BYTES", "DeferredLogits", "DeferredLoss", "chunked_cross_entropy", "computed"]

CHUNK_BYTES: Final = 64 * 2**20
"""Of the fp32 logits that are computed at once."""

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, int, str], torch.Tensor]
"""From x [N, D], weight [V, D], bias [V], target [N], ignore_index and reduction (mean or sum) to a scalar."""


class DeferredLogits:
    """Logits [B, T, V] that are not computed yet. Any use but that of :class:`DeferredLoss` computes them.

    Args:
        head: the last layer.
        x: what it is applied to, [B, T, D].
    """

    def __init__(self, head: Any, x: torch.Tensor) -> None:
        self._head = head
        self._x = x
        self._computed: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The logits."""
        if self._computed is None:
            deferring, self._head._deferring = self._head._deferring, False
            try:
                self._computed = cast(torch.Tensor, self._head(self._x))
            finally:
                self._head._deferring = deferring
        return self._computed

    @property
    def if_computed(self) -> torch.Tensor | None:
        """The logits, where something has asked for them."""
        return self._computed

    def operands(self, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """x [N, D], weight and bias; ``None`` where the logits exist, or the weight is in parts or flat."""
        weight = self._head.weight
        whole = not isinstance(weight, DTensor) and weight.shape == (vocab_size, self._x.shape[-1])
        if self._computed is not None or not whole:
            return None
        return self._x.reshape(-1, self._x.shape[-1]), weight, self._head.bias

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes them and goes on."""
        return func(*map(computed, args), **{key: computed(value) for key, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def __mul__(self, other: Any) -> Any:
        return self.tensor() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.tensor() / other

    def __add__(self, other: Any) -> Any:
        return self.tensor() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.tensor() - other

    def __neg__(self) -> Any:
        return -self.tensor()


def computed(value: Any) -> Any:
    """Logits as a tensor; anything else as it is."""
    return value.tensor() if isinstance(value, DeferredLogits) else value


class DeferredLoss:
    """The loss of a causal language model from :class:`DeferredLogits`, or from a tensor by the model's own.

    Args:
        own: the loss function of the model.
        kernel: ``torch`` or ``liger``.
    """

    def __init__(self, own: Callable[..., torch.Tensor], kernel: str) -> None:
        self._own = own
        self._kernel = kernel

    def __call__(
        self,
        logits: DeferredLogits | torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As transformers' ``ForCausalLMLoss``: label ``t + 1`` against the logits of token ``t``."""
        operands = logits.operands(vocab_size) if isinstance(logits, DeferredLogits) else None
        if operands is None:
            return self._own(
                computed(logits),
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        x, weight, bias = operands
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(x.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = self._function(x, weight, bias)(x, weight, bias, target, ignore_index, reduction)
        if num_items_in_batch is None:
            return loss
        count = num_items_in_batch
        return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)

    def _function(self, *tensors: torch.Tensor | None) -> Loss:
        if self._kernel == "liger" and _kernels.runs_kernels(*tensors):
            return _kernels.linear_cross_entropy
        return chunked_cross_entropy


def chunked_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """The cross-entropy of ``F.linear(x, weight, bias)`` in fp32; a chunk's logits are computed twice.

    Args:
        x: [N, D].
        weight: [V, D].
        bias: [V], or ``None``.
        target: [N], classes.
        ignore_index: the target of tokens that do not count.
        reduction: ``mean`` over the tokens that count, or ``sum``.
        chunk_bytes: of a chunk's logits, at least those of one token.
    """
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    total = x.new_zeros((), dtype=torch.float32)
    for part, wanted in zip(x.split(rows), target.split(rows), strict=True):
        total = total + checkpoint(
            _summed, part, weight, bias, wanted, ignore_index, use_reentrant=False, preserve_rng_state=False
        )
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _summed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    logits = F.linear(x, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
