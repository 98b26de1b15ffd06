"""Attention to some of the keys, with what is needed to merge it with attention to the others.

The softmax over all keys is a mean of the softmaxes over parts, weighted by the parts' sums of exponentials:
with ``o_i`` and the logarithm of the sum ``l_i`` of part i, ``l = logsumexp_i l_i`` and
``o = sum_i exp(l_i - l) o_i``. Given ``l`` and ``o``, the gradients of each part follow by themselves
(Dao 2022, FlashAttention; Liu et al. 2023, Ring Attention).

Legend: H heads, T queries, S keys, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from atorch_ns.sharding._ring_kernels import Kernel, find_kernel

__all__ = ["Part", "attend", "attend_backward", "merge"]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_MOST_SCORES: Final = 2**22
"""Scores that are alive at once where no kernel can be used: 16 MiB of float32."""


@dataclass(frozen=True)
class Part:
    """How queries see a part of the keys.

    Attributes:
        scale: of the scores.
        causal: whether query t sees key s only if s <= t, both counted within the part.
        mask: broadcast to [..., H, T, S]; bool or added; ``None`` for none.
    """

    scale: float
    causal: bool = False
    mask: torch.Tensor | None = None

    def scores(self, query: torch.Tensor, key: torch.Tensor, rows: slice) -> torch.Tensor:
        """[..., H, rows, S] of some queries, float32; -inf where nothing is seen."""
        scores = query[..., rows, :].float() @ key.float().transpose(-1, -2) * self.scale
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill_(hidden.triu_(1 + rows.start), float("-inf"))
        if self.mask is None:
            return scores
        mask = self.mask[..., rows, :] if self.mask.dim() > 1 and self.mask.size(-2) > 1 else self.mask
        if mask.dtype == torch.bool:
            return scores.masked_fill_(~mask, float("-inf"))
        return scores.add_(mask)

    def add_rows(self, of_mask: torch.Tensor, of_scores: torch.Tensor, rows: slice) -> None:
        """Adds the gradient of some rows of scores [..., H, rows, S] to that of the mask, summed as it is broadcast."""
        target = of_mask[..., rows, :] if of_mask.dim() > 1 and of_mask.size(-2) > 1 else of_mask
        target += of_scores.sum_to_size(target.shape)

    def kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
        """A fused kernel for this part, if there is one."""
        square = query.size(-2) == key.size(-2)
        return find_kernel(query, key, value) if self.mask is None and (square or not self.causal) else None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [..., H, T, E] to [..., H, S, E].

    Returns:
        The result [..., H, T, E'] and the logarithm of the sum of exponentials [..., H, T], float32: 0 and -inf
        where a query sees no key.
    """
    kernel = part.kernel(query, key, value)
    if kernel is not None:
        out, lse = kernel.forward(query, key, value, part.causal, part.scale)
        return out.float(), lse
    outs, logarithms = [], []
    for rows in _chunks(query, key):
        scores = part.scores(query, key, rows)
        logarithms.append(torch.logsumexp(scores, -1))
        weights = scores.sub_(_finite(logarithms[-1])[..., None]).exp_()
        outs.append(weights @ value.float())
    return torch.cat(outs, -2), torch.cat(logarithms, -1)


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the logarithm over the keys of both."""
    total = torch.logaddexp(lse, more_lse)
    safe = _finite(total)
    out = out * torch.exp(lse - safe)[..., None] + more * torch.exp(more_lse - safe)[..., None]
    return out, total


def attend_backward(
    gradient: torch.Tensor,
    tensors: Tensors,
    result: tuple[torch.Tensor, torch.Tensor],
    part: Part,
    *,
    trains_mask: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients that a part of the keys contributes and receives.

    Args:
        gradient: of the merged result, float32 [..., H, T, E'].
        tensors: queries, and the part's keys and values.
        result: the merged result, float32 [..., H, T, E'], and its logarithm [..., H, T].
        part: the part.
        trains_mask: whether the mask has a gradient.

    Returns:
        Of queries, keys, values, and the mask, float32 and of its shape.
    """
    query, key, value = tensors
    out, lse = result
    kernel = part.kernel(query, key, value)
    if kernel is not None:
        given = (out.to(query.dtype), _finite(lse))
        return *kernel.backward(gradient.to(query.dtype), tensors, given, part.causal, part.scale), None
    keys, values = key.float(), value.float()
    of_query, of_key, of_value = [], torch.zeros_like(keys), torch.zeros_like(values)
    of_mask = None
    if trains_mask and part.mask is not None:
        of_mask = torch.zeros_like(part.mask, dtype=torch.float32)
    for rows in _chunks(query, key):
        weights = part.scores(query, key, rows).sub_(_finite(lse[..., rows])[..., None]).exp_()
        mine = gradient[..., rows, :]
        of_value += weights.transpose(-1, -2) @ mine
        share = (mine * out[..., rows, :]).sum(-1, keepdim=True)
        of_scores = weights.mul_((mine @ values.transpose(-1, -2)).sub_(share))
        if of_mask is not None:
            part.add_rows(of_mask, of_scores, rows)
        of_scores = of_scores.mul_(part.scale)
        of_query.append(of_scores @ keys)
        of_key += of_scores.transpose(-1, -2) @ query[..., rows, :].float()
    return torch.cat(of_query, -2), of_key, of_value, of_mask


def _chunks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Queries in pieces whose scores are few enough."""
    length = query.size(-2)
    per_row = query[..., 0, 0].numel() * key.size(-2)
    step = max(1, _MOST_SCORES // max(per_row, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Zero where no key is seen: an exponential of -inf minus it is zero and not NaN."""
    return torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
