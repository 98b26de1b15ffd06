"""``nn.MultiheadAttention`` divided by heads: its code reads weights of layers that it never calls.

Legend: B batch, T queries, S keys, D width, H heads, n ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.sharding.rank_context import Region, TensorGroup, local_part
from atorch_ns.sharding.sequence.attention import additive_mask

Dims = dict[str, tuple[int, tuple[int, ...] | None]]


def why_not_by_heads(module: nn.Module, degree: int) -> str | None:
    """The reason why a module cannot be divided by heads; ``None`` if it can."""
    if not isinstance(module, nn.MultiheadAttention):
        return f"{type(module).__name__} is not an nn.MultiheadAttention"
    if type(module).forward is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward of its own"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys of its own (add_bias_kv, add_zero_attn)"
    if module.num_heads % degree:
        return f"its {module.num_heads} heads do not divide by {degree}"
    return None


def attention_dims(module: nn.MultiheadAttention) -> Dims:
    """The dimension of each divided parameter, and the parts of fused ones."""
    width = module.embed_dim
    if module.in_proj_weight is not None:
        dims: Dims = {"in_proj_weight": (0, (width,) * 3)}  # fused as [q | k | v]
    else:
        dims = {f"{name}_proj_weight": (0, None) for name in "qkv"}
    if module.in_proj_bias is not None:
        dims["in_proj_bias"] = (0, (width,) * 3)
    return {**dims, "out_proj.weight": (1, None)}  # its bias stays whole: it is added to the sum


class DividedAttention:
    """Attention of this rank's H / n heads; inputs and results are whole on every rank."""

    _tensor_group: TensorGroup
    _region: Region

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same arguments and results as ``nn.MultiheadAttention.forward``."""
        is_3d = query.dim() == 3  # else [T, D] of one sample
        inputs = [_batch_first(self, x, is_3d) for x in (query, key, value)]
        q, k, v = _project_heads(self, [self._region.enter(x) for x in inputs])
        self._region.inside(self.training, q.device)
        causal = is_causal and key_padding_mask is None and not need_weights
        # As in torch: where only the hint counts, the mask is not looked at.
        mask = None if causal else _combine_masks(self, key_padding_mask, attn_mask, q.shape[0], is_3d=is_3d)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # [B, H / n, T, S]
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, dropout)  # as torch's, whose weights are those after dropout
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        self._region.outside()
        out = self._region.leave(F.linear(mixed.transpose(1, 2).flatten(2), local_part(self.out_proj.weight)))
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias.to(out.dtype)  # once, after the sum over ranks
        if weights is not None:
            weights = _whole_weights(self, weights, average_attn_weights, is_3d)
        if not is_3d:
            return out.squeeze(0), weights
        return (out if self.batch_first else out.transpose(0, 1)), weights


def _batch_first(module: Any, x: torch.Tensor, is_3d: bool) -> torch.Tensor:
    if not is_3d:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _project_heads(module: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    if module.in_proj_weight is not None:
        weights = local_part(module.in_proj_weight).chunk(3)  # this rank's [q | k | v]
    else:
        weights = tuple(local_part(getattr(module, f"{name}_proj_weight")) for name in "qkv")
    biases: tuple[Any, ...] = (None,) * 3
    if module.in_proj_bias is not None:
        biases = local_part(module.in_proj_bias).chunk(3)
    flat = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    # Queries, keys and values of this rank's heads, each [B, H / n, T or S, D / H].
    return [x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in flat]


def _combine_masks(
    module: Any, padding: torch.Tensor | None, mask: torch.Tensor | None, num_samples: int, *, is_3d: bool
) -> torch.Tensor | None:
    dtype: torch.dtype = module.out_proj.weight.dtype
    total: torch.Tensor | None = None  # added to the scores: broadcasts to [B, H / n, T, S]
    if mask is not None:
        total = additive_mask(mask, dtype)
        if total.dim() == 3:  # [B * H, T, S]: each head has its own
            total = total.unflatten(0, (num_samples, -1))
            share = total.shape[1] // module._tensor_group.size
            total = total.narrow(1, module._tensor_group.rank * share, share)
    if padding is not None:
        rows = additive_mask(padding if is_3d else padding.unsqueeze(0), dtype)[:, None, None, :]
        total = rows if total is None else total + rows
    return total


def _whole_weights(module: Any, weights: torch.Tensor, average: bool, is_3d: bool) -> torch.Tensor:
    group: TensorGroup = module._tensor_group
    if average:
        weights = group.leave(weights.sum(1)) / (weights.shape[1] * group.size)  # [B, T, S], their mean
    else:
        weights = group.gather(weights, 1)  # [B, H, T, S]
    return weights if is_3d else weights.squeeze(0)


def without_fast_path(module: nn.Module) -> None:
    """Turns off the fused inference of ``nn.TransformerEncoderLayer``, which reads whole weights itself."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
