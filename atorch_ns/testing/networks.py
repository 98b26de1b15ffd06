"""Small networks written by hand, plain enough to check a strategy against.

Legend: B batch, T tokens, S source tokens, F features, D width, H heads, V vocabulary.

None holds a buffer, so each can be built on the meta device and initialised later.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """``x + down(gelu(up(norm(x))))`` with a LayerNorm; [B, D] to [B, D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class ResidualMlp(nn.Module):
    """Features [B, F] to outputs [B, num_outputs] through residual blocks in a ModuleList."""

    def __init__(
        self,
        *,
        num_features: int = 16,
        width: int = 32,
        hidden: int = 64,
        num_blocks: int = 4,
        num_outputs: int = 8,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(num_features, width)
        self.blocks = nn.ModuleList(ResidualBlock(width, hidden) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict from ``features``; ``targets`` is accepted so that a (features, targets) pair unpacks."""
        x = self.stem(features)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def _apply_rotary(x: Tensor) -> Tensor:
    """Rotary position encoding of [B, H, T, D/H], positions 0..T-1."""
    num_tokens, head_dim = x.shape[-2:]
    half = head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)  # [D/H/2]
    angle = torch.arange(num_tokens, device=x.device, dtype=torch.float32)[:, None] * frequency  # [T, D/H/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]  # feature i is rotated with i + half
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Attention(nn.Module):
    """Causal self-attention with rotary positions; [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # -1 heads: under tensor parallelism a rank holds some of them.
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(_apply_rotary(q), _apply_rotary(k), v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))  # from [B, H, T, D/H]
        return out


class _SwiGlu(nn.Module):
    """``down(silu(gate(x)) * up(x))``; [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderBlock(nn.Module):
    """Pre-norm attention and SwiGLU, each with a residual; [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = _Attention(width, num_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = _SwiGlu(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class TiedLlama(nn.Module):
    """A Llama-like decoder whose output head is its embedding; tokens [B, T] to logits [B, T, V]."""

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        width: int = 32,
        num_heads: int = 4,
        num_layers: int = 4,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(DecoderBlock(width, num_heads, hidden) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=width**-0.5)  # logits have a variance of 1
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.norm(x))
        return out


class _MultiHeadAttention(nn.Module):
    """Multi-head attention with biases of ``x`` [B, T, D] to ``memory`` [B, S, D], giving [B, T, D]."""

    def __init__(self, width: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            self._split_heads(self.query(x)),
            self._split_heads(self.key(memory)),
            self._split_heads(self.value(memory)),
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(x.size(0), x.size(1), -1))
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, H, T, D/H]."""
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)


class _FeedForward(nn.Sequential):
    """``down(gelu(up(x)))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and a feed-forward network; [B, S, D] to [B, S, D]."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = _MultiHeadAttention(width, num_heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = _FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        norm_x = self.self_norm(x)
        x = x + self.self_attention(norm_x, norm_x)
        out: Tensor = x + self.feed_forward(self.feed_norm(x))
        return out


class CrossBlock(nn.Module):
    """Pre-norm causal self-attention, attention to the encoder's output, and a feed-forward network.

    [B, T, D] and the memory [B, S, D] to [B, T, D].
    """

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = _MultiHeadAttention(width, num_heads, causal=True)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = _MultiHeadAttention(width, num_heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = _FeedForward(width, hidden)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Apply the block."""
        norm_x = self.self_norm(x)
        x = x + self.self_attention(norm_x, norm_x)
        x = x + self.cross_attention(self.cross_norm(x), memory)
        out: Tensor = x + self.feed_forward(self.feed_norm(x))
        return out


class EncoderDecoder(nn.Module):
    """Source tokens [B, S] and target tokens [B, T] to next-token logits [B, T, V].

    One embedding is used for the source, for the target and, as ``lm_head``, for the logits.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        width: int = 32,
        num_heads: int = 4,
        num_layers: int = 2,
        hidden: int = 64,
        max_tokens: int = 16,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_tokens, width)
        self.encoder = nn.ModuleList(EncoderBlock(width, num_heads, hidden) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(CrossBlock(width, num_heads, hidden) for _ in range(num_layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        nn.init.normal_(self.positions.weight, std=width**-0.5)
        self.lm_head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Next-token logits of the target."""
        memory = self._embed_tokens(source)
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        x = self._embed_tokens(target)
        for block in self.decoder:
            x = block(x, memory)
        out: Tensor = self.lm_head(self.decoder_norm(x))
        return out

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        out: Tensor = self.embed(tokens) + self.positions(places)
        return out
