"""Ring attention: keys and values travel from rank to rank, and each rank attends to those that it holds.

Each rank keeps its queries. In n steps it sees the keys and values of all ranks, sends them on while it
computes, and merges the results (Liu et al. 2023, Ring Attention). In the backward pass gradients travel too.

The softmax over all keys is a mean of the softmaxes over parts, weighted by the parts' sums of exponentials:
with ``o_i`` and the logarithm of the sum ``l_i`` of part i, ``l = logsumexp_i l_i`` and
``o = sum_i exp(l_i - l) o_i``. Given ``l`` and ``o``, the gradients of each part follow independently
(Dao 2022, FlashAttention). Parts are computed by torch's fused kernels where one returns the logarithm of the
sum, once it has agreed with the formula on this device, in this dtype and for this head width.

Under a causal mask with the sequence in zigzag, a rank that holds the pieces r and 2n-1-r sees: of its own
keys the lower triangle; of an earlier rank's the early half, with all queries; of a later rank's both halves,
with its late queries. So all ranks do equal work in every step, and no step needs a mask.

Legend: B batch, H heads, T queries, S keys, E head width, n ranks, L positions of one rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from atorch_ns.errors import InputError
from atorch_ns.sharding.collectives import Group, sent_on
from atorch_ns.sharding.rank_context import call_in_thread
from atorch_ns.sharding.sequence.attention import AttentionCall, own_rows
from atorch_ns.sharding.sequence.plan import SequenceLayout
from atorch_ns.torch_compat import FlashAttention

# Rounding errors of values around 1; a wrong order of logarithms or a lost factor gives 1e-1 or more.
_TOLERANCES: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_LARGEST_WIDTH: Final = 256  # largest head width in flash attention


@functools.cache
def _tested_kernel(device: torch.device, dtype: torch.dtype, width: int) -> FlashAttention | None:
    dtypes = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}
    if dtype not in dtypes.get(device.type, ()):
        return None
    kernel = FlashAttention(device.type)
    try:
        errors = call_in_thread(
            lambda: [_kernel_error(kernel, device, dtype, width, causal=c) for c in (False, True)], device
        )
    except (RuntimeError, TypeError, AttributeError):  # missing in this build or device, or another signature
        return None
    return kernel if all(error < _TOLERANCES[dtype] for error in errors) else None


def _kernel_error(
    kernel: FlashAttention, device: torch.device, dtype: torch.dtype, width: int, *, causal: bool
) -> float:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(1, 2, 8, width, generator=generator).to(device, dtype) for _ in range(4)]  # q k v dO
    query, key, value, gradient = (tensor.float() for tensor in draws)
    scale = width**-0.5
    scores = query @ key.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(8, 8, dtype=torch.bool, device=device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    out = weights @ value
    share = (gradient * out).sum(-1, keepdim=True)  # rowsum(dO * O)
    of_scores = weights * (gradient @ value.transpose(-1, -2) - share) * scale
    of_key, of_value = of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
    tensors = (draws[0], draws[1], draws[2])
    outputs = kernel.forward(*tensors, causal, scale)
    gradients = kernel.backward(draws[3], tensors, (out.to(dtype), lse), causal, scale)
    references = (out, lse, of_scores @ key, of_key, of_value)
    pairs = zip((*outputs, *gradients), references, strict=True)
    # Python's max would pass over what is not a number.
    return float(torch.stack([(mine.float() - theirs).abs().max() for mine, theirs in pairs]).max())


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_MOST_SCORES: Final = 2**22  # alive at once where no kernel can be used: 16 MiB of float32


@dataclass(frozen=True)
class RingPart:
    """The scale and masks with which queries see a part of the keys.

    Attributes:
        scale: the factor of the scores.
        causal: whether query t sees key s only if s <= t, both counted within the part.
        mask: broadcast to [..., H, T, S]; bool or added; ``None`` for none.
    """

    scale: float
    causal: bool = False
    mask: torch.Tensor | None = None

    def scores(self, query: torch.Tensor, key: torch.Tensor, rows: slice) -> torch.Tensor:
        """Scores [..., H, rows, S] of some queries, float32; -inf where masked."""
        scores = query[..., rows, :].float() @ key.float().transpose(-1, -2) * self.scale
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            # Row i of the slice is query rows.start + i: the diagonal moves with it.
            scores = scores.masked_fill_(hidden.triu_(1 + rows.start), float("-inf"))
        if self.mask is None:
            return scores
        mask = self.mask[..., rows, :] if self.mask.dim() > 1 and self.mask.size(-2) > 1 else self.mask
        if mask.dtype == torch.bool:
            return scores.masked_fill_(~mask, float("-inf"))
        return scores.add_(mask)

    def add_rows(self, of_mask: torch.Tensor, of_scores: torch.Tensor, rows: slice) -> None:
        """Adds the gradient of score rows [..., H, rows, S] to the mask's, summed over broadcast dims."""
        target = of_mask[..., rows, :] if of_mask.dim() > 1 and of_mask.size(-2) > 1 else of_mask
        target += of_scores.sum_to_size(target.shape)

    def kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> FlashAttention | None:
        """A fused kernel that was verified for such tensors and this part; ``None`` if there is none."""
        width = query.size(-1)
        square = query.size(-2) == key.size(-2)
        alike = query.dtype == key.dtype == value.dtype and value.size(-1) == width
        if self.mask is not None or (self.causal and not square) or not alike:
            return None
        if query.dim() != 4 or width % 8 or width > _LARGEST_WIDTH:  # flash kernels need [B, H, T, E]
            return None
        return _tested_kernel(query.device, query.dtype, width)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: RingPart
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [..., H, T, E] to [..., H, S, E].

    Returns:
        The result [..., H, T, E'] and the logarithm of the sum of exponentials [..., H, T], float32: 0 and
            -inf where a query sees no key.
    """
    kernel = part.kernel(query, key, value)
    if kernel is not None:
        out, lse = kernel.forward(query, key, value, part.causal, part.scale)
        return out.float(), lse
    outs, logarithms = [], []
    for rows in _query_chunks(query, key):
        scores = part.scores(query, key, rows)
        logarithms.append(torch.logsumexp(scores, -1))
        weights = scores.sub_(_finite_lse(logarithms[-1])[..., None]).exp_()  # softmax over this part
        outs.append(weights @ value.float())
    return torch.cat(outs, -2), torch.cat(logarithms, -1)


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two results and their logarithms over the keys of both."""
    total = torch.logaddexp(lse, more_lse)
    safe = _finite_lse(total)  # a query that sees no key in either stays 0
    out = out * torch.exp(lse - safe)[..., None] + more * torch.exp(more_lse - safe)[..., None]
    return out, total


def attend_backward(
    gradient: torch.Tensor,
    tensors: Tensors,
    result: tuple[torch.Tensor, torch.Tensor],
    part: RingPart,
    *,
    trains_mask: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes the gradients that a part of the keys contributes and receives.

    Args:
        gradient: gradient of the merged result, float32 [..., H, T, E'].
        tensors: queries, and the part's keys and values.
        result: the merged result, float32 [..., H, T, E'], and its logarithm [..., H, T].
        trains_mask: whether the mask has a gradient.

    Returns:
        Gradients of queries, keys, values and mask, float32. The last has the mask's shape.
    """
    query, key, value = tensors
    out, lse = result
    kernel = part.kernel(query, key, value)
    if kernel is not None:
        outputs = (out.to(query.dtype), _finite_lse(lse))
        return *kernel.backward(gradient.to(query.dtype), tensors, outputs, part.causal, part.scale), None
    keys, values = key.float(), value.float()
    of_query, of_key, of_value = [], torch.zeros_like(keys), torch.zeros_like(values)
    of_mask = None
    if trains_mask and part.mask is not None:
        of_mask = torch.zeros_like(part.mask, dtype=torch.float32)
    for rows in _query_chunks(query, key):
        # As FlashAttention: P = exp(S - lse), with lse of all keys, and dS = P * (dO V^T - rowsum(dO * O)).
        weights = part.scores(query, key, rows).sub_(_finite_lse(lse[..., rows])[..., None]).exp_()
        mine = gradient[..., rows, :]
        of_value += weights.transpose(-1, -2) @ mine
        share = (mine * out[..., rows, :]).sum(-1, keepdim=True)
        of_scores = weights.mul_((mine @ values.transpose(-1, -2)).sub_(share))
        if of_mask is not None:
            part.add_rows(of_mask, of_scores, rows)
        of_scores = of_scores.mul_(part.scale)  # after the mask, which is added to scaled scores
        of_query.append(of_scores @ keys)
        of_key += of_scores.transpose(-1, -2) @ query[..., rows, :].float()
    return torch.cat(of_query, -2), of_key, of_value, of_mask


def _query_chunks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    length = query.size(-2)
    per_row = query[..., 0, 0].numel() * key.size(-2)  # scores of one query in all samples and heads
    step = max(1, _MOST_SCORES // max(per_row, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _finite_lse(lse: torch.Tensor) -> torch.Tensor:
    # Zero where no key is seen, so that exp(-inf - lse) is zero and not NaN.
    return torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)


def ring_attention(call: AttentionCall, layout: SequenceLayout, group: Group) -> torch.Tensor:
    """Attention [..., H, L, E'] of this rank's queries [..., H, L, E] to the keys of all ranks.

    In each dimension the mask covers the whole sequence or this rank's positions.

    Raises:
        InputError: for dropout of attention weights, which no rank could draw again alone.
    """
    if call.dropout > 0:
        raise InputError(
            f"ring attention cannot drop attention weights (dropout_p={call.dropout}): each block of them would "
            "need its own mask, identical in forward and backward. Use kind='ulysses', or set the model's "
            "attention dropout to 0."
        )
    mask = None if call.mask is None else own_rows(call.mask, layout, group)
    scale = 1 / math.sqrt(call.query.size(-1)) if call.scale is None else call.scale
    ring = _Ring(layout, group, scale, call.causal)
    run: Any = _RingAttention.apply
    out: torch.Tensor = run(call.query, call.key, call.value, mask, ring)
    return out.to(call.query.dtype)


@dataclass(frozen=True)
class _Step:
    """One rank's computation with the keys of another: slices of its queries and of the keys."""

    queries: slice
    keys: slice
    part: RingPart


@dataclass(frozen=True)
class _Ring:
    layout: SequenceLayout
    group: Group
    scale: float
    causal: bool  # whether queries see earlier positions only

    def step(self, sender: int, mask: torch.Tensor | None) -> _Step | None:
        """The work on ``sender``'s keys under ``mask`` (own queries by all keys); ``None`` if unseen."""
        layout, rank = self.layout, self.layout.rank
        real = layout.num_real(sender)
        if real == 0:  # nothing but padding
            return None
        everything = slice(0, layout.local)
        if not self.causal or sender == rank:
            part = RingPart(self.scale, self.causal, self._mask_columns(mask, sender, real))
            # Under a causal mask padding comes last and need not attend to anything here.
            return _Step(slice(0, real) if self.causal else everything, slice(0, real), part)
        part = RingPart(self.scale)
        half = layout.local // 2
        # An earlier rank: its early piece lies before both of this rank's, its late one after both.
        if sender < rank:
            return _Step(everything, slice(0, min(real, half) if layout.zigzag else real), part)
        # A later rank: in zigzag both of its pieces lie between this rank's, in order all of it lies after.
        return _Step(slice(half, layout.local), slice(0, real), part) if layout.zigzag else None

    def _mask_columns(self, mask: torch.Tensor | None, sender: int, real: int) -> torch.Tensor | None:
        if mask is None or mask.size(-1) == 1:
            return mask
        return mask.index_select(-1, self.positions(sender, real, mask.device))

    def positions(self, sender: int, real: int, device: torch.device) -> torch.Tensor:
        return self.layout.places(sender, device)[:real]

    def add_columns(self, of_mask: torch.Tensor, gradient: torch.Tensor, sender: int, rows: slice) -> None:
        """Adds the mask's gradient from the keys of ``sender``: [..., rows, S], or with size 1 for both."""
        part = of_mask[..., rows, :] if of_mask.dim() > 1 and of_mask.size(-2) > 1 else of_mask
        if of_mask.size(-1) == 1:
            part += gradient
        else:
            part.index_add_(-1, self.positions(sender, gradient.size(-1), gradient.device), gradient)

    def turns(self, *tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """Yields each rank's number and tensors, this rank's first. The next travel during computation."""
        size, rank = self.group.size(), self.group.rank()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])  # one message for all
        lengths = [tensor.numel() for tensor in tensors]
        for turn in range(size):
            # Keys of the rank `turn` places before this one have arrived; in the last turn none are sent on.
            pending, following = ([], flat) if turn == size - 1 else sent_on(flat, self.group)
            pieces = flat.split(lengths)
            yield (rank - turn) % size, tuple(p.view(t.shape) for p, t in zip(pieces, tensors, strict=True))
            for work in pending:
                work.wait()
            flat = following


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        ring: _Ring,
    ) -> torch.Tensor:
        out = torch.zeros((*query.shape[:-1], value.size(-1)), dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:-1], float("-inf"), dtype=torch.float32, device=query.device)
        # Query heads that share a key head: keys travel once for all of them.
        groups = query.size(-3) // key.size(-3) if query.dim() > 2 and key.dim() > 2 else 1
        for sender, (keys, values) in ring.turns(key, value):
            step = ring.step(sender, mask)
            if step is not None:
                rows = step.queries
                k, v = (
                    _repeat_heads(keys[..., step.keys, :], groups),
                    _repeat_heads(values[..., step.keys, :], groups),
                )
                more, more_lse = attend(query[..., rows, :], k, v, step.part)
                new_out, total = merge(out[..., rows, :], lse[..., rows], more, more_lse)
                out[..., rows, :], lse[..., rows] = new_out, total
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.ring, ctx.groups = ring, groups
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring, groups = ctx.ring, ctx.groups
        gradient = gradients[0].float()
        of_query = torch.zeros_like(query, dtype=torch.float32)
        of_mask = torch.zeros_like(mask, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        # The gradients of keys and values travel one step behind them, and one step more to get home.
        travelling = torch.zeros(key.numel() + value.numel(), dtype=torch.float32, device=query.device)
        for sender, (keys, values) in ring.turns(key, value):
            step = ring.step(sender, mask)
            if step is not None:
                rows, columns = step.queries, step.keys
                tensors = (
                    query[..., rows, :],
                    _repeat_heads(keys[..., columns, :], groups),
                    _repeat_heads(values[..., columns, :], groups),
                )
                result = (out[..., rows, :], lse[..., rows])
                step_grads = attend_backward(
                    gradient[..., rows, :], tensors, result, step.part, trains_mask=of_mask is not None
                )
                of_query[..., rows, :] += step_grads[0]
                of_key, of_value = _key_value_views(travelling, key, value)
                of_key[..., columns, :] += _sum_repeated_heads(step_grads[1], groups)
                of_value[..., columns, :] += _sum_repeated_heads(step_grads[2], groups)
                if of_mask is not None and step_grads[3] is not None:
                    ring.add_columns(of_mask, step_grads[3], sender, rows)
            works, arriving = sent_on(travelling, ring.group)
            for work in works:
                work.wait()
            travelling = arriving
        of_key, of_value = _key_value_views(travelling, key, value)
        found_mask = None if of_mask is None else of_mask.to(mask.dtype)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), found_mask, None


def _key_value_views(
    flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[: key.numel()].view(key.shape), flat[key.numel() :].view(value.shape)


def _repeat_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    return x if times == 1 else x.repeat_interleave(times, -3)  # [..., K, S, E] to [..., H, S, E]


def _sum_repeated_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    # The gradient of _repeat_heads: the sum over the query heads that share a key head.
    return x if times == 1 else x.unflatten(-3, (-1, times)).sum(-3)
