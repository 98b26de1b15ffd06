"""Tiny configurations of transformers: sizes made small by the names that architectures give them; flags stay as they are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["FIRST_SPECIAL", "NUM_TOKENS", "SCALES", "VOCAB_SIZE", "Scale", "tiny_config"]

VOCAB_SIZE: Final = 96
FIRST_SPECIAL: Final = 64
"""Tokens from here on are special ones; samples have none of them but where an image stands."""
NUM_TOKENS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How small.

    Attributes:
        layers: blocks of every stack.
        width: features of an activation.
        heads: of attention.
        kv_heads: of keys and values, where a configuration names them.
        lists: whether sizes in lists, one for each stage, are made small too.
        derived: whether sizes that follow from others unless they are given are given.
    """

    layers: int = 2
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    lists: bool = True
    derived: bool = False

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.width // self.heads


SCALES: Final = (
    Scale(),
    Scale(layers=4),  # hybrids need a layer of each kind
    Scale(derived=True),
    Scale(layers=4, derived=True),
    Scale(layers=8),
    Scale(kv_heads=4),
    Scale(width=64, kv_heads=4),
    Scale(width=64, heads=2, kv_heads=2, layers=6),
    Scale(lists=False),
)
"""Tried one after the other until one makes a model that computes."""

Rule = Callable[[Scale, Any], Any]


def _at_most(most: int) -> Rule:
    return lambda _, value: min(value, most)


def _exactly(value: Any) -> Rule:
    return lambda scale, old: value


# The first that matches the whole name decides.
_RULES: Final[tuple[tuple[str, Rule], ...]] = (
    (r".*mask_(time|feature)_prob|.*jitter.*|apply_spec_augment", _exactly(0)),
    (r"(.*_)?vocab_size(_per_layer_input)?|n_vocab|vocabulary_size", _exactly(VOCAB_SIZE)),
    (r"(.*_)?p?drop(out|path|_path|layer)?(_p|_rate|_prob|_ratio)?|.*dropout.*|.*layerdrop.*", _exactly(0)),
    (r"initializer_range|init_std", lambda _, value: max(value, 0.05)),
    (
        r"(.*_)?(n|num)_(.*_)?layers?|(.*_)?(layers|depth)|(.*_)?n_layers?|(.*_)?num_(hidden_)?blocks|n_blocks",
        lambda scale, _: scale.layers,
    ),
    (r"depths|.*num_blocks|layers_per_.*", _exactly(1)),
    (r"(mamba_)?d_head|mamba_head_dim", lambda scale, _: 2 * scale.width // scale.heads),
    (
        r"(.*_)?(num_)?(key_value|kv)_heads|(.*_)?n_head_kv|(.*_)?n_kv_heads?",
        lambda scale, v: min(v, scale.kv_heads),
    ),
    (r"(.*_)?(num_|n_)?(.*_)?heads?", lambda scale, value: min(value, scale.heads)),
    (r"rotary_dim", lambda scale, _: scale.head_dim // 2),
    (r"(.*_)?head_dim|d_kv|head_size|attention_key_size", lambda scale, _: scale.head_dim),
    (r"mrope_section", lambda scale, value: _shares(scale.head_dim // 2, len(value))),
    (r".*expert.*intermediate_size|moe_.*size", lambda scale, value: min(value, scale.width)),
    (
        r".*intermediate_size|d_ff|(.*_)?ff(n)?_(dim|size)|n_inner|.*(ffn|feedforward|mlp|ff).*(size|dim)",
        lambda scale, v: min(v, 2 * scale.width),
    ),
    (r".*max_position.*|n_positions|n_ctx|.*max_(seq|source|target).*|seq_length|max_seq.*", _at_most(64)),
    (r"sliding_window|.*attention_window|local_attention|attention_chunk_size", _at_most(8)),
    (r"window_size", _at_most(4)),
    (r"(.*_)?(num|n)_(.*_)?experts|moe_num_experts", _at_most(4)),
    (r".*experts_per_tok.*|moe_top_?k|top_k|moe_k|num_selected_experts|router_topk", _at_most(2)),
    (r"n_group|topk_group|n_groups|num_expert_group", _exactly(1)),
    (r".*lora_(rank|dim)", _at_most(16)),
    (r"time_step_rank", _at_most(4)),
    (r"(image|img|input|crop)_size|.*image_size", _exactly(32)),
    (r".*patch_size", _at_most(8)),
    (r"num_mel_bins|feature_size|input_feat_per_channel|num_freq_bins|n_mels", _at_most(16)),
    (
        r".*hidden_sizes?|d_model|n_embd|(.*_)?(embed|emb|embedding|hidden|model|proj|projection)?_?dim|embedding_size|"
        r"width|.*embed_size|.*_dims?|conv_channels|embed_dims|hidden_channels|.*embedding_size",
        lambda scale, value: min(value, scale.width),
    ),
)
_DERIVED: Final = (
    "head_dim",
    "num_key_value_heads",
    "sliding_window",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
_NEVER: Final = re.compile(
    r"num_channels|in_channels|in_chans|.*num_labels|.*_ratio|temporal_.*|.*_token_id|.*out_channels.*|.*kernel.*|.*stride.*"
)


Given = Mapping[str, Mapping[str, Any]]


def tiny_config(cls: type[Any], scale: Scale, given: Given) -> Any:
    """A small configuration of the class, with what is ``given`` for its ``model_type`` and for those of its parts."""
    return _smaller(cls(), scale, given)


def _smaller(config: Any, scale: Scale, given: Given) -> Any:
    """A new configuration of the same class."""
    found: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name, value in _values(config, fields):
        if name in getattr(config, "sub_configs", {}):
            found[name] = _smaller(value, scale, given) if dataclasses.is_dataclass(value) else value
        elif isinstance(value, (bool, str)) and value != fields[name].default:
            found[name] = value  # a part may differ from the defaults of its class
        elif isinstance(value, Mapping) and "mrope_section" in value:
            found[name] = {key: _small(key, item, scale, item) for key, item in value.items()}
        elif fields[name].default is None and not scale.derived:
            continue  # it follows from the others
        elif isinstance(value, Mapping):
            found[name] = {key: _small(key, item, scale, item) for key, item in value.items()}
        elif (small := _small(name, value, scale)) is not None:
            found[name] = small
    if scale.derived:
        absent = [name for name in _DERIVED if name in fields and getattr(config, name, None) is None]
        found |= {name: _small(name, 10**6, scale) for name in absent}
    found |= _token_ids(config, fields)
    return type(config)(**{**found, **_one_for_each_layer(config, found), **given.get(config.model_type, {})})


def _values(config: Any, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in fields:
        try:
            value = getattr(config, name, None)
        except Exception:  # some differ from layer to layer and cannot be read as one
            continue
        if value is not None:
            yield name, value


def _token_ids(config: Any, fields: Mapping[str, Any]) -> dict[str, int]:
    """Ids beyond the small vocabulary become its last ones, each its own, which random tokens leave out."""
    ids = {
        name: value
        for name, value in sorted(_values(config, fields))
        if re.search(r"token_(id|index)$", name)
    }
    large = [name for name, value in ids.items() if isinstance(value, int) and value >= FIRST_SPECIAL]
    return {name: VOCAB_SIZE - 1 - number for number, name in enumerate(large)}


def _one_for_each_layer(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer, as long as there are layers, and with every kind that there was."""
    name = next((name for name in ("num_hidden_layers", "num_layers", "n_layer") if name in found), None)
    lists = {}
    for key in dataclasses.fields(config) if name else ():
        value = found.get(key.name, getattr(config, key.name, None) if key.default is not None else None)
        if isinstance(value, (list, tuple)) and len(value) == getattr(config, str(name)):
            kept = list(value[: found[str(name)]])
            for position, kind in enumerate(
                sorted({str(v) for v in value} - {str(v) for v in kept})[: len(kept)]
            ):
                kept[-1 - position] = next(v for v in value if str(v) == kind)
            lists[key.name] = kept
    return lists


def _small(name: str, value: Any, scale: Scale, otherwise: Any = None) -> Any:
    if isinstance(value, (bool, str)) or value is None or _NEVER.fullmatch(name):
        return otherwise
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, name):
            if name == "mrope_section":
                return rule(scale, value)
            if isinstance(value, (int, float)):
                return type(value)(rule(scale, value))
            if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
                return type(value)(rule(scale, item) for item in value) if scale.lists else otherwise
            return otherwise
    return otherwise


def _shares(total: int, count: int) -> list[int]:
    """Whole numbers that add up to ``total``."""
    each, rest = divmod(total, count)
    return [each + (position < rest) for position in range(count)]
