"""Ring attention: keys and values travel from rank to rank, and each rank attends to what is with it.

Each rank keeps its queries. In n steps it sees the keys and values of all ranks, sends them on while it computes,
and merges the results (Liu et al. 2023, Ring Attention). In the backward pass they travel once more, and their
gradients with them.

Under a causal mask with the sequence in zigzag, a rank that holds the pieces r and 2n-1-r sees: of its own keys
the lower triangle; of an earlier rank's keys the early half, with all its queries; of a later rank's keys both
halves, with its late queries. So all ranks do the same work in every step, and no step needs a mask.

Legend: as in ``_ring_parts.py``; n ranks, L positions of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.errors import InputError
from atorch_ns.sharding._attention_calls import AttentionCall
from atorch_ns.sharding._ring_parts import Part, attend, attend_backward, merge
from atorch_ns.sharding._sequence_layout import SequenceLayout
from atorch_ns.sharding._ulysses import own_rows

__all__ = ["ring_attention"]


def ring_attention(call: AttentionCall, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """Attention of this rank's queries [..., H, L, E] to the keys of all ranks; [..., H, L, E'].

    The mask is that of the whole sequence or of this rank's positions, in either dimension.

    Raises:
        InputError: for dropout of attention weights, which no rank could draw again alone.
    """
    if call.dropout > 0:
        raise InputError(
            f"ring attention cannot drop attention weights (dropout_p={call.dropout}): each block of them would "
            "need a mask of its own, the same in forward and backward. Use kind='ulysses', or set the model's "
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
    """What one rank computes while it holds the keys of another: slices of its queries and of the keys."""

    queries: slice
    keys: slice
    part: Part


@dataclass(frozen=True)
class _Ring:
    """One call's surroundings.

    Attributes:
        layout: who holds what.
        group: the ranks.
        scale: of the scores.
        causal: whether queries see earlier positions only.
    """

    layout: SequenceLayout
    group: dist.ProcessGroup
    scale: float
    causal: bool

    def step(self, sender: int, mask: torch.Tensor | None) -> _Step | None:
        """What this rank computes with the keys of ``sender``; ``None`` if it sees none of them.

        ``mask`` is for this rank's queries and all keys.
        """
        layout, rank = self.layout, self.layout.rank
        real = layout.num_real(sender)
        if real == 0:
            return None
        everything = slice(0, layout.local)
        if not self.causal or sender == rank:
            part = Part(self.scale, self.causal, self._columns(mask, sender, real))
            # Under a causal mask what is padding comes last and need not see anything here.
            return _Step(slice(0, real) if self.causal else everything, slice(0, real), part)
        part = Part(self.scale)
        half = layout.local // 2
        if sender < rank:
            return _Step(everything, slice(0, min(real, half) if layout.zigzag else real), part)
        return _Step(slice(half, layout.local), slice(0, real), part) if layout.zigzag else None

    def _columns(self, mask: torch.Tensor | None, sender: int, real: int) -> torch.Tensor | None:
        if mask is None or mask.size(-1) == 1:
            return mask
        return mask.index_select(-1, self.positions(sender, real, mask.device))

    def positions(self, sender: int, real: int, device: torch.device) -> torch.Tensor:
        """The first positions of a rank."""
        return torch.tensor(self.layout.positions(sender)[:real], device=device)

    def add_columns(self, of_mask: torch.Tensor, found: torch.Tensor, sender: int, rows: slice) -> None:
        """Adds the gradient of the mask that the keys of ``sender`` give: [..., rows, S], or with size 1 for both."""
        part = of_mask[..., rows, :] if of_mask.dim() > 1 and of_mask.size(-2) > 1 else of_mask
        if of_mask.size(-1) == 1:
            part += found
        else:
            part.index_add_(-1, self.positions(sender, found.size(-1), found.device), found)

    def turns(self, *tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """The tensors of every rank in turn, with the rank they are of, this rank's first.

        The next ones travel while the caller computes with these.
        """
        size, rank = self.group.size(), self.group.rank()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        lengths = [tensor.numel() for tensor in tensors]
        for turn in range(size):
            pending, following = ([], flat) if turn == size - 1 else self.send_on(flat)
            pieces = flat.split(lengths)
            yield (rank - turn) % size, tuple(p.view(t.shape) for p, t in zip(pieces, tensors, strict=True))
            for work in pending:
                work.wait()
            flat = following

    def send_on(self, flat: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
        """Sends to the next rank what the previous one sends here; what to wait for, and what arrives."""
        size, rank = self.group.size(), self.group.rank()
        arriving = torch.empty_like(flat)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, flat, group=self.group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=(rank - 1) % size),
            ]
        )
        return works, arriving


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
        groups = _sharing(query, key)
        for sender, (keys, values) in ring.turns(key, value):
            step = ring.step(sender, mask)
            if step is not None:
                rows = step.queries
                k, v = _spread(keys[..., step.keys, :], groups), _spread(values[..., step.keys, :], groups)
                more, more_lse = attend(query[..., rows, :], k, v, step.part)
                merged, total = merge(out[..., rows, :], lse[..., rows], more, more_lse)
                out[..., rows, :], lse[..., rows] = merged, total
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
                    _spread(keys[..., columns, :], groups),
                    _spread(values[..., columns, :], groups),
                )
                result = (out[..., rows, :], lse[..., rows])
                found = attend_backward(
                    gradient[..., rows, :], tensors, result, step.part, trains_mask=of_mask is not None
                )
                of_query[..., rows, :] += found[0]
                of_key, of_value = _views(travelling, key, value)
                of_key[..., columns, :] += _collect(found[1], groups)
                of_value[..., columns, :] += _collect(found[2], groups)
                if of_mask is not None and found[3] is not None:
                    ring.add_columns(of_mask, found[3], sender, rows)
            works, arriving = ring.send_on(travelling)
            for work in works:
                work.wait()
            travelling = arriving
        of_key, of_value = _views(travelling, key, value)
        found_mask = None if of_mask is None else of_mask.to(mask.dtype)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), found_mask, None


def _views(flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[: key.numel()].view(key.shape), flat[key.numel() :].view(value.shape)


def _sharing(query: torch.Tensor, key: torch.Tensor) -> int:
    """How many query heads share a key head."""
    return query.size(-3) // key.size(-3) if query.dim() > 2 and key.dim() > 2 else 1


def _spread(x: torch.Tensor, times: int) -> torch.Tensor:
    """Shared heads [..., K, S, E] repeated for every query head, [..., H, S, E]."""
    return x if times == 1 else x.repeat_interleave(times, -3)


def _collect(x: torch.Tensor, times: int) -> torch.Tensor:
    """The sum over the query heads that share a key head: the gradient of :func:`_spread`."""
    return x if times == 1 else x.unflatten(-3, (-1, times)).sum(-3)
