"""Tiny configurations of transformers: sizes made small by the names that architectures give them; flags stay as they are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["FIRST_SPECIAL", "NUM_TOKENS", "VOCAB_SIZE", "tiny_config"]

VOCAB_SIZE: Final = 96
FIRST_SPECIAL: Final = 64
"""Tokens from here on are special ones; samples have none of them but where an image stands."""
NUM_TOKENS: Final = 16
_WIDTH: Final = 32
_HEADS: Final = 4
_LAYERS: Final = 2
_PATTERN_LAYERS: Final = 4
"""Layers of models that alternate between kinds of layers."""
_IMAGE: Final = 32
_PATCH: Final = 8

_RULES: Final[tuple[tuple[str, Any], ...]] = (
    # The first that matches the whole name decides.
    (r"(.*_)?vocab_size|n_vocab|vocabulary_size", VOCAB_SIZE),
    (r"vocab_size_per_layer_input", VOCAB_SIZE),
    (r"(.*_)?(dropout|drop|pdrop|layerdrop|drop_rate|drop_prob|dropout_prob|drop_path_rate|dropout_rate)(_.*)?", 0.0),
    (r"(mask_time_prob|mask_feature_prob|router_jitter_noise|jitter_noise|input_jitter_noise|layer_drop.*)", 0.0),
    (r"initializer_range|init_std", lambda value: max(value, 0.05) if value else value),
    (r"num_(hidden|encoder|decoder|attention|backbone|text|vision|image|audio|context|prenet|conv_pos_embedding_groups_)?_?layers", _LAYERS),
    (r"(n_layers?|num_layers?|.*_num_(hidden_)?layers|.*_n_layers?|(encoder|decoder|.*)_layers|depth|num_blocks|num_hidden_blocks|n_blocks|.*_depth)", _LAYERS),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads?|.*num_key_value_heads)", lambda value: min(value, 2)),
    (r"(num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|.*attention_heads|.*_num_heads|.*_n_heads?|.*_num_attention_heads)", lambda value: min(value, _HEADS)),
    (r"(head_dim|qk_head_dim|v_head_dim|d_kv|attention_head_dim|.*_head_dim|head_size|attention_key_size)", _WIDTH // _HEADS),
    (r"(intermediate_size|d_ff|ffn_dim|n_inner|inner_dim|ffn_hidden_size|.*_ffn_dim|.*intermediate_size|.*ffn_hidden_size|feed_forward_size|d_inner|.*mlp_dim|.*ff_dim|dim_ff|.*dim_feedforward|ff_hidden_size|ffn_size)", lambda value: min(value, 2 * _WIDTH)),
    (r"(moe_intermediate_size|.*expert.*intermediate_size|expert_ffn.*size)", lambda value: min(value, _WIDTH)),
    (r"(max_position_embeddings|n_positions|n_ctx|max_sequence_length|seq_length|max_seq_len|.*max_position.*|max_source_positions|max_target_positions|max_seq_length|.*max_seq_len)", 64),
    (r"(sliding_window|attention_window|local_attention|window_size|attention_chunk_size|chunk_size|.*chunk_length)", lambda value: min(value, 8)),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|.*num_experts|num_routed_experts)", lambda value: min(value, 4)),
    (r"(num_experts_per_tok|moe_top_?k|top_k|moe_k|num_selected_experts|.*experts_per_tok.*|topk|router_topk|num_experts_per_token)", lambda value: min(value, 2)),
    (r"(n_group|topk_group|n_groups|num_expert_group)", 1),
    (r"(q_lora_rank|kv_lora_rank|.*lora_rank|.*_lora_dim)", lambda value: min(value, 16)),
    (r"(qk_rope_head_dim|qk_nope_head_dim)", _WIDTH // _HEADS),
    (r"(hidden_size|d_model|n_embd|embed_dim|dim|emb_dim|hidden_dim|embedding_size|embedding_dim|.*hidden_size|.*embed_dim|.*_dim|.*hidden_dim|projection_dim|width|word_embed_proj_dim|.*embed_size|conv_dim_out|embeddings_size|channels|.*_channels)", lambda value: min(value, _WIDTH)),
    (r"(image_size|img_size|input_size|crop_size|.*image_size)", _IMAGE),
    (r"(patch_size|.*patch_size)", lambda value: min(value, _PATCH)),
    (r"num_mel_bins|feature_size|input_feat_per_channel|num_freq_bins", lambda value: min(value, 16)),
    (r"depths", lambda value: [1] * len(value)),
)
_NEVER: Final = re.compile(r"num_channels|in_channels|in_chans|.*num_labels|mlp_ratio|temporal_patch_size|.*_token_id|.*out_channels.*")


def tiny_config(cls: type[Any], **given: Any) -> Any:
    """A small configuration of the class; ``given`` values replace what the rules say."""
    return cls(**{**_overrides(cls()), **given})


def _overrides(config: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config)}
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(config, name, None)
        if name in getattr(config, "sub_configs", {}) and value is not None:
            found[name] = _sub_config(value)
        elif (small := _small(name, value)) is not None:
            found[name] = small
    found |= _token_ids(config, names)
    kinds = getattr(config, "layer_types", None)
    if kinds and "layer_types" in names:
        count = _PATTERN_LAYERS if len(set(kinds)) > 1 else _LAYERS
        found["layer_types"] = _covering(list(kinds), count)
        found |= {name: count for name in found if found[name] == _LAYERS and "layers" in name}
    return found


def _token_ids(config: Any, names: set[str]) -> dict[str, int]:
    """Ids beyond the small vocabulary become its last ones, each its own, which random tokens leave out."""
    ids = {name: getattr(config, name, None) for name in sorted(names) if re.search(r"token_(id|index)$", name)}
    large = [name for name, value in ids.items() if isinstance(value, int) and value >= FIRST_SPECIAL]
    return {name: VOCAB_SIZE - 1 - number for number, name in enumerate(large)}


def _sub_config(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return type(value)(**_overrides(value))


def _covering(kinds: list[str], count: int) -> list[str]:
    """The first layers, with the last replaced where a kind would be missing."""
    kept = kinds[:count]
    for position, kind in enumerate(sorted(set(kinds) - set(kept))):
        kept[-1 - position] = kind
    return kept


def _small(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)) or _NEVER.fullmatch(name):
        return None
    for pattern, to in _RULES:
        if re.fullmatch(pattern, name):
            if isinstance(value, (int, float)):
                small = to(value) if callable(to) else to
                return type(value)(small)
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
                return _small_list(to, value)
            return None
    return None


def _small_list(to: Any, value: Any) -> Any:
    rule: Callable[[Any], Any] = to if callable(to) else lambda _: to
    try:
        return type(value)(rule(item) for item in value)
    except TypeError:
        return rule(value)
