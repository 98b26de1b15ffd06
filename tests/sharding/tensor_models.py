"""Small models whose code reshapes heads in the ways that hand-written models do.

Legend: B batch, T tokens, D width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCAB, TOKENS = 16, 4, 32, 8


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention of [B, T, H, D / H] to [B, T, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(2)


class ByCount(nn.Module):
    """Reshapes by its number of heads: a plan that divides the layers alone gives wrong numbers and no error."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, -1)
        out: Tensor = self.o(attend(*(layer(x).view(shape) for layer in (self.q, self.k, self.v))))
        return out


class Hiding(ByCount):
    """Hides what a mask says, with an offset for each head: hidden altogether, all heads would be alike."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        hidden = (
            torch.ones(*x.shape[:2], x.size(1), device=x.device).triu(1) > 0 if hidden is None else hidden
        )
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.mT).masked_fill(hidden[:, None], torch.finfo(x.dtype).min)
        out: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class FusedParts(nn.Module):
    """One layer for [q | k | v]."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        out: Tensor = self.o(attend(*(part.unflatten(-1, (-1, self.head_dim)) for part in parts)))
        return out


class FusedByHead(nn.Module):
    """One layer in which each head's q, k and v lie together, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, -1)).chunk(3, -1)
        out: Tensor = self.o(attend(q, k, v))
        return out


class FusedGrouped(nn.Module):
    """[q | k | v] with half as many heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv, self.o = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_size, self.kv_size = WIDTH, WIDTH // 2

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split((self.q_size, self.kv_size, self.kv_size), -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        out: Tensor = self.o(attend(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
        return out


@dataclass
class Settings:
    """What a hand-written model keeps its sizes in."""

    n_head: int = HEADS
    n_embd: int = WIDTH


class BySettings(nn.Module):
    """Reads its number of heads from an object that all blocks share."""

    shared = Settings()

    def __init__(self) -> None:
        super().__init__()
        self.cfg = self.shared
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        out: Tensor = self.o(attend(*(p.unflatten(-1, (self.cfg.n_head, -1)) for p in parts)))
        return out


class WithNorms(nn.Module):
    """Norms of queries and keys over a head, whose weights all heads share, and a learned gate."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.LayerNorm(self.head_dim, bias=False)
        self.gate = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(attend(self.q_norm(q), self.k_norm(k), v * self.gate))
        return out


class NormOverHeads(nn.Module):
    """A norm over all heads together, which no rank can compute alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.q(x), dim=-1)
        out: Tensor = self.o(
            attend(*(p.unflatten(-1, (-1, self.head_dim)) for p in (q, self.k(x), self.v(x))))
        )
        return out


class Block(nn.Module):
    """Attention and an MLP whose gate and input are one layer, each with a residual and a dropout."""

    def __init__(self, attention: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.residual = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.residual(self.attention(self.norm1(x)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        out: Tensor = x + self.residual(self.down(self.inner(F.silu(gate) * up)))
        return out


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, V], with a scale of its own on the logits."""

    def __init__(
        self,
        attention: type[nn.Module] = ByCount,
        *,
        vocab: int = VOCAB,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Between(Decoder):
    """Code between its blocks sees the hidden states."""

    def __init__(self, what: str) -> None:
        super().__init__(ByCount, tied=what == "a tied weight")
        self.what = what
        self.scale, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.between(block(x), tokens)
        out: Tensor = self.head(self.norm(x))
        return out

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        """What each rank would get wrong on a piece of the sequence."""
        match self.what:
            case "parameters":
                return x * self.scale + self.bias
            case "a mean":
                return x + x.mean(1, keepdim=True)
            case "a value":
                return x * 1.1 if x.mean().item() > 0 else x * 0.9
            case "a tied weight":
                return x + F.softmax(F.linear(x, self.embed.weight), -1) @ self.embed.weight
            case _:
                return x.masked_fill((tokens % 5 == 0)[..., None], 0.0)


BETWEEN = ("parameters", "a mean", "a value", "a tied weight", "a mask")


class _BesideBlock(Block):
    what: str

    def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        if self.what == "a value":
            self.aux = out.pow(2).mean()
        if self.what == "a batch norm":
            out = self.batch_norm(out.transpose(1, 2)).transpose(1, 2)  # type: ignore[operator]
        return out + 0.1 * first if self.what == "the first states" else out


class Beside(Decoder):
    """Something of its blocks counts outside them too."""

    def __init__(self, what: str) -> None:
        super().__init__(ByCount)
        self.what = what
        for block in self.blocks:
            block.__class__ = _BesideBlock
            block.what = what  # type: ignore[assignment]
            if what == "a batch norm":
                block.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x, first)
        out: Tensor = self.head(self.norm(x))
        if self.what == "a value":
            values: list[Any] = [block.aux for block in self.blocks]
            out = out * (1 + sum(values))
        if self.what == "a weight":
            norms: list[Any] = [block.norm1 for block in self.blocks]
            out = out * (1 + sum(norm.weight.pow(2).sum() for norm in norms))
        return out


class Heads(nn.Module):
    """Six heads, or fewer of keys and values, under names of its own."""

    def __init__(self, kv: int = 6) -> None:
        super().__init__()
        self.h, self.kv, self.size = 6, kv, 4
        self.q, self.o = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, kv * self.size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.h, self.size))
        k, v = (
            layer(x).unflatten(-1, (self.kv, self.size)).repeat_interleave(self.h // self.kv, 2)
            for layer in (self.k, self.v)
        )
        out: Tensor = self.o(attend(q, k, v))
        return out


def make(attention: type[nn.Module] = ByCount, **settings: object) -> Decoder:
    """A decoder, equal on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Decoder(attention, **settings)  # type: ignore[arg-type]


def tokens(vocab: int = VOCAB) -> Tensor:
    """A batch of ids [4, T]."""
    return torch.randint(vocab, (4, TOKENS), generator=torch.Generator().manual_seed(1))


ATTENTIONS: tuple[type[nn.Module], ...] = (
    ByCount,
    FusedParts,
    FusedByHead,
    FusedGrouped,
    BySettings,
    WithNorms,
)
