"""Counts of a model that methods divide: attention heads, experts and the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["experts_per_token", "num_experts", "num_heads", "num_key_value_heads", "vocabulary_size"]

_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "nhead")
_KEY_VALUE_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k")
_VOCABULARY = ("vocab_size", "vocabulary_size", "n_vocab")


def num_heads(model: nn.Module) -> int:
    """Attention heads of a layer, from the model's config or its modules' attributes; 0 if neither tells."""
    return _first(_holders(model), _HEADS)


def num_key_value_heads(model: nn.Module) -> int:
    """Heads of keys and values; those of queries where nothing else is said."""
    return _first(_holders(model), _KEY_VALUE_HEADS) or num_heads(model)


def num_experts(model: nn.Module) -> int:
    """Experts of a layer, from the model's config or its modules' attributes; 0 if neither tells."""
    return _first(_holders(model), _EXPERTS)


def experts_per_token(model: nn.Module) -> int:
    """Experts that compute each token; 1 where nothing is said, 0 without experts."""
    return (_first(_holders(model), _PER_TOKEN) or 1) if num_experts(model) else 0


def vocabulary_size(model: nn.Module) -> int:
    """Rows of the token embedding: what the config says, else the largest ``nn.Embedding``; 0 without one."""
    told = _first(_configs(model), _VOCABULARY)
    if told:
        return told
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)


def _configs(model: nn.Module) -> Iterable[Any]:
    config = getattr(model, "config", None)
    if config is not None:
        yield config
        text = getattr(config, "text_config", None)
        if text is not None:
            yield text


def _holders(model: nn.Module) -> Iterable[Any]:
    yield from _configs(model)
    yield from model.modules()


def _first(holders: Iterable[Any], names: Iterable[str]) -> int:
    wanted = tuple(names)
    for holder in holders:
        for name in wanted:
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0
