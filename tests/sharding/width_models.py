"""Attention that works out sizes of heads from the width of its input, in the ways of hand-written models.

Legend: B batch, T tokens, C width, H heads, D size of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharding.tensor_models import HEADS, TOKENS, WIDTH, attend


class Causal(nn.Module):
    """As in nanoGPT: [q | k | v] split by an attribute, views by the input's width, the mask in a buffer."""

    flash = False

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, 0.0
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights_dropout, self.out_dropout = nn.Dropout(self.dropout), nn.Dropout(self.dropout)
        # Long enough for sequences that are as long as the width.
        self.register_buffer("past", torch.ones(2 * WIDTH, 2 * WIDTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        fused = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in fused)
        if self.flash:
            dropout = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            scores = q @ k.mT / math.sqrt(C // self.n_head)
            scores = scores.masked_fill(~self.past[:T, :T], -math.inf)  # type: ignore[index]
            mixed = self.weights_dropout(scores.softmax(-1)) @ v
        out: Tensor = self.c_proj(mixed.transpose(1, 2).contiguous().view(B, T, C))
        dropped: Tensor = self.out_dropout(out)
        return dropped


class FlashCausal(Causal):
    """The same by torch's kernel."""

    flash = True


class FiveDims(nn.Module):
    """[B, T, 3, H, D] with H of the module and D worked out, and scores scaled by what the width gives."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        size = width // self.heads
        qkv = self.to_qkv(x).reshape(rows, length, 3, self.heads, size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = ((q * size**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        out: Tensor = self.to_out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class HeadsBySize(nn.Module):
    """The number of heads is worked out from the width; the norm of the input lies inside."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        heads = x.shape[-1] // self.size
        q, k, v = (layer(x).view(*x.shape[:2], heads, self.size) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(attend(q, k, v).view(x.shape))
        return out


class ScaledByWidth(FiveDims):
    """Scores are scaled by the whole width, which no rank may take for its share: must stay whole."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.to_qkv(x).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = ((q * width**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        out: Tensor = self.to_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class Gated(FiveDims):
    """The input's values count beside the layers: must stay whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean(-1, keepdim=True).sigmoid()


class DropsWhileTraining(FiveDims):
    """In training, and not in evaluation, the layers get something else than the input."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        given = F.dropout(x, 0.1) if self.training else x
        qkv = self.to_qkv(given).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: Tensor = self.to_out(mixed.reshape(rows, length, width))
        return out


class ScaledMlp(nn.Module):
    """An MLP that scales its input by the width of it, and its hidden features by theirs."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x * x.shape[-1] ** -0.5))
        if self.hidden:
            inner = inner * inner.shape[-1] ** -0.5
        out: Tensor = self.down(inner)
        return out


class Reader(nn.Module):
    """Reads [B, S, C] of others through queries [B, T, C] of its own; gets them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, *, memory: Tensor) -> Tensor:
        rows, length, width = x.shape
        size = width // self.heads
        q = self.q(x).view(rows, length, self.heads, size).transpose(1, 2)
        k, v = self.kv(memory).split(memory.shape[-1], -1)
        k, v = (t.view(rows, memory.shape[1], self.heads, size).transpose(1, 2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: Tensor = self.o(mixed.reshape(rows, length, width))
        return out


class Crossing(nn.Module):
    """Attention to itself and then to a part of what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.reader = FlashCausal(), Reader()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.reader(self.own(x), memory=x[:, : TOKENS // 2])
        return out
