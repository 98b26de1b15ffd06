"""Blocks as people write them, each in a model that calls it as its author would.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 32, 4
HEAD = WIDTH // HEADS


class Block(nn.Module):
    """Attention and a feed-forward network around it; subclasses say how attention is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values [B, H, T, D/H]."""
        shape = (*x.shape[:2], HEADS, HEAD)
        return [part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]

    def close(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class FlagBlock(Block):
    """A causal flag."""

    def forward(self, x: Tensor) -> Tensor:
        return self.close(x, F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


class InnerMaskBlock(Block):
    """Makes a causal mask of its own."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        return self.close(x, F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask))


class BufferMaskBlock(Block):
    """Cuts a causal mask out of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 1, 64, 64, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[:, :, : x.size(1), : x.size(1)]
        return self.close(x, F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask))


class CountedMaskBlock(Block):
    """Counts positions twice: for a mask, and for an embedding that it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(x.size(1), device=x.device))
        numbers = torch.arange(x.size(1), device=x.device)
        mask = numbers[:, None] >= numbers[None]
        return self.close(x, F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask))


class TableBlock(Block):
    """Adds the first rows of a table, different in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[: x.size(1)]
        return self.close(x, F.scaled_dot_product_attention(*self.heads(x)))


class RotaryBlock(Block):
    """Is given angles [T, D/H/2] and a mask of padding [B, T]."""

    def forward(self, x: Tensor, angles: Tensor, *, padding: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = (torch.cat((t[..., ::2] * angles.cos(), t[..., 1::2] * angles.sin()), -1) for t in (q, k))
        mask = padding[:, None, None, :]
        return self.close(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class BiasBlock(Block):
    """Is given a trained bias of attention [H, T, T], and returns a tuple."""

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, None]:
        return self.close(x, F.scaled_dot_product_attention(*self.heads(x), attn_mask=bias)), None


class MultiHeadBlock(nn.Module):
    """``nn.MultiheadAttention`` that drops its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed)[0]


class WrittenOutBlock(Block):
    """Attention written out: a soft cap, a sink for each head, a causal mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD)).tanh() * 2
        later = torch.ones(x.size(1), x.size(1), device=x.device).triu(diagonal=1).bool()
        scores = scores.masked_fill(later, float("-inf"))
        sinks = self.sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
        return self.close(x, torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v)


class EinsumBlock(Block):
    """Sums of products, a trained bias [H, T, T] that it is given, and a mask cut out of a buffer by the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(HEAD) + bias
        scores = scores.where(self.seen[: scores.size(-2), : scores.size(-1)], float("-inf"))
        weights = scores.softmax(-1)
        return self.close(x, torch.einsum("bhqk, bhkd -> bhqd", weights, v)), weights


class SlopesBlock(Block):
    """As Bloom's: slopes [B H, 1, T] that it is given are added by the product; numbers of positions make the mask."""

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in self.heads(x))
        scores = slopes.baddbmm(batch1=q, batch2=k.mT, alpha=HEAD**-0.5)
        number = torch.arange(x.size(1), device=x.device)
        scores = scores.view(len(x), HEADS, x.size(1), -1)
        scores = scores.masked_fill(number[:, None] < torch.arange(x.size(1)), float("-inf"))
        mixed = torch.bmm(scores.softmax(-1).flatten(0, 1), v)
        return self.close(x, mixed.unflatten(0, (len(x), HEADS)))


class MeanBlock(Block):
    """Adds the mean of all positions, without any attention."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(x.mean(1, keepdim=True))


class ShiftBlock(WrittenOutBlock):
    """Written out, and each position is mixed with the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, 1))


class NeighbourBlock(Block):
    """Mixes each position with the one before it, which may be on another rank."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.roll(1, 1)
        return self.close(x, F.scaled_dot_product_attention(*self.heads(x)))


class Chain(nn.Module):
    """Two blocks, called with what ``arguments`` makes of the input and a trained scale."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        arguments: Callable[[Tensor, Tensor], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        given = self.arguments(x, self.scale) if self.arguments is not None else {}
        for block in self.blocks:
            x = block(x, **given)
            x = x[0] if isinstance(x, tuple) else x
        return x


def _rotary(x: Tensor, scale: Tensor) -> dict[str, Any]:
    angles = torch.outer(torch.arange(x.size(1)), torch.arange(1, HEAD // 2 + 1)) / 7
    padding = torch.ones(x.shape[:2], dtype=torch.bool)
    padding[0, :3] = False
    return {"angles": angles, "padding": padding}


def _bias(x: Tensor, scale: Tensor) -> dict[str, Any]:
    values = torch.sin(torch.arange(HEADS * x.size(1) ** 2).view(HEADS, x.size(1), x.size(1)))
    return {"bias": values * scale}


def _slopes(x: Tensor, scale: Tensor) -> dict[str, Any]:
    slopes = torch.outer(2.0 ** -torch.arange(HEADS), torch.arange(x.size(1)))
    return {"slopes": slopes.repeat(len(x), 1)[:, None]}


def _layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True, norm_first=norm_first)


def _layer_mask(x: Tensor, scale: Tensor) -> dict[str, Any]:
    mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[0, -2:] = True
    return {"src_mask": mask, "src_key_padding_mask": padding}


CHAINS: dict[str, Callable[[], Chain]] = {
    "flag": lambda: Chain(FlagBlock),
    "inner mask": lambda: Chain(InnerMaskBlock),
    "buffer mask": lambda: Chain(BufferMaskBlock),
    "counted mask": lambda: Chain(CountedMaskBlock),
    "table": lambda: Chain(TableBlock),
    "rotary": lambda: Chain(RotaryBlock, _rotary),
    "multi-head": lambda: Chain(MultiHeadBlock),
    "torch's layer": lambda: Chain(lambda: _layer(True)),
    "torch's layer with masks": lambda: Chain(lambda: _layer(False), _layer_mask),
}
TRAINED_BIAS: dict[str, Callable[[], Chain]] = {"bias": lambda: Chain(BiasBlock, _bias)}
WRITTEN_OUT: dict[str, Callable[[], Chain]] = {
    "written out": lambda: Chain(WrittenOutBlock),
    "einsum": lambda: Chain(EinsumBlock, _bias),
    "slopes": lambda: Chain(SlopesBlock, _slopes),
}
REFUSED: dict[str, Callable[[], Chain]] = {
    "mean": lambda: Chain(MeanBlock),
    "shifted": lambda: Chain(ShiftBlock),
    "neighbour": lambda: Chain(NeighbourBlock),
}
