"""Models of published runs, built of transformers' classes on meta, with adapters of peft where a run trains these alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.profile import fused

__all__ = ["build", "words"]

_PROJECTIONS: Final = {
    "attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
"""Projections that have adapters, by the word after ``lora=<rank>@`` in a row's notes."""
_ADAPTERS: Final = re.compile(r"lora=(\d+)@(\w+)")
_QWEN3_MOE: Final[Mapping[str, Mapping[str, Any]]] = {
    "30b": {"moe_intermediate_size": 768},
    "235b": {"moe_intermediate_size": 1536},
}
"""huggingface.co/Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B, config.json: 128 experts, 8 for a token, heads of 128."""
_KIMI_K2: Final[Mapping[str, Any]] = {
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
}
"""huggingface.co/moonshotai/Kimi-K2-Base, config.json: what differs from DeepSeek-V3."""
_GPT_OSS: Final[Mapping[str, Mapping[str, Any]]] = {
    "20b": {"num_local_experts": 32},
    "120b": {"num_local_experts": 128},
}
"""huggingface.co/openai/gpt-oss-20b and gpt-oss-120b, config.json."""


def words(cells: Mapping[str, str]) -> str:
    """The model in words."""
    names = {"gpt": "GPT-2", "llama": "Llama", "hf-llama": "Llama"}
    adapters = _ADAPTERS.search(cells["notes"])
    with_adapters = f" with adapters of rank {adapters[1]} ({adapters[2]})" if adapters else ""
    kind = names.get(cells["arch"], cells["arch"])
    return f"{kind}, {cells['layers']} blocks, width {cells['hidden']}, {cells['seq']} tokens{with_adapters}"


def build(cells: Mapping[str, str], *, attention: str) -> nn.Module:
    """The model of a row, on meta.

    Args:
        cells: the row, column by column.
        attention: transformers' name of the attention.
    """
    family, _, variant = cells["arch"].removeprefix("hf-").partition(":")
    shared: dict[str, Any] = {
        "vocab_size": int(cells["vocab"]),
        "tie_word_embeddings": cells["tied"] == "1",
        "use_cache": False,
        "attn_implementation": attention,
    }
    with torch.device("meta"):
        model = _BUILDERS[family](cells, variant, shared)
        return _with_adapters(model, cells["notes"])


def _with_adapters(model: nn.Module, notes: str) -> nn.Module:
    found = _ADAPTERS.search(notes)
    if found is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=int(found[1]), lora_alpha=2 * int(found[1]), target_modules=_PROJECTIONS[found[2]])
    adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted


def _decoder_sizes(cells: Mapping[str, str]) -> dict[str, Any]:
    return {
        "hidden_size": int(cells["hidden"]),
        "intermediate_size": int(cells["ffn"]),
        "num_hidden_layers": int(cells["layers"]),
        "num_attention_heads": int(cells["heads"]),
        "num_key_value_heads": int(cells["kv_heads"]),
        "max_position_embeddings": int(cells["seq"]),
    }


def _gpt2(cells: Mapping[str, str], _: str, shared: Mapping[str, Any]) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = float(cells.get("dropout") or 0)
    config = GPT2Config(
        n_positions=int(cells["seq"]),
        n_embd=int(cells["hidden"]),
        n_layer=int(cells["layers"]),
        n_head=int(cells["heads"]),
        n_inner=int(cells["ffn"]),
        activation_function="gelu",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        **shared,
    )
    return GPT2LMHeadModel(config)


def _llama(cells: Mapping[str, str], _: str, shared: Mapping[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes(cells), **shared))


def _qwen2(cells: Mapping[str, str], _: str, shared: Mapping[str, Any]) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_decoder_sizes(cells), **shared))


def _qwen3_moe(cells: Mapping[str, str], variant: str, shared: Mapping[str, Any]) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**_decoder_sizes(cells), **experts, **_QWEN3_MOE[variant], **shared)
    return Qwen3MoeForCausalLM(config)


def _deepseek_v3(cells: Mapping[str, str], variant: str, shared: Mapping[str, Any]) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    changes = _KIMI_K2 if variant == "kimi-k2" else {}  # the class's own values are DeepSeek-V3's
    return DeepseekV3ForCausalLM(DeepseekV3Config(**_decoder_sizes(cells), **changes, **shared))


def _gpt_oss(cells: Mapping[str, str], variant: str, shared: Mapping[str, Any]) -> nn.Module:
    from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM

    AttentionInterface.register("sinks", _attention_with_sinks)
    if shared["attn_implementation"] == "sdpa":  # which the class does not have
        shared = {**shared, "attn_implementation": "sinks"}
    config = GptOssConfig(**_decoder_sizes(cells), head_dim=64, **_GPT_OSS[variant], **shared)
    return GptOssForCausalLM(config)


def _attention_with_sinks(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """The class's own attention as one kernel, of which every second layer's keeps to the last 128 tokens."""

    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return eager_attention_forward(module, query, key, value, mask, options["scaling"])[0].transpose(1, 2)

    kernel = fused(attend, like="attention", is_causal=True, window=options["sliding_window"])
    return kernel(query, key, value, options["s_aux"]).transpose(1, 2), None


_BUILDERS: Final[Mapping[str, Callable[[Mapping[str, str], str, Mapping[str, Any]], nn.Module]]] = {
    "gpt": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3-moe": _qwen3_moe,
    "deepseek-v3": _deepseek_v3,
    "gpt-oss": _gpt_oss,
}
"""Builders by the first part of the column ``arch``, each ``(cells, variant, shared) -> model``."""
