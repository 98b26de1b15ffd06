"""Small models of transformers, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {
    "input_ids": torch.arange(24).reshape(2, 12) % 16,
    "attention_mask": torch.ones(2, 12, dtype=torch.long),
}
PADDED = {**TOKENS, "attention_mask": torch.tensor([[1] * 12, [1] * 9 + [0] * 3])}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def llama(attention: str = "eager", **settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **{"vocab_size": 16, "num_key_value_heads": 2, "attn_implementation": attention, **SMALL, **settings}
    )
    return seeded(lambda: transformers.LlamaForCausalLM(config))


def gpt2(attention: str = "eager", **settings: Any) -> nn.Module:
    config = transformers.GPT2Config(
        **{
            "vocab_size": 16,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "attn_implementation": attention,
            **settings,
        }
    )
    return seeded(lambda: transformers.GPT2LMHeadModel(config))


def bert(attention: str = "eager") -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
        **SMALL,
    )
    return seeded(lambda: transformers.BertForMaskedLM(config))


def clip_vision(attention: str = "eager") -> nn.Module:
    config = transformers.CLIPVisionConfig(
        image_size=16, patch_size=8, attn_implementation=attention, **SMALL
    )
    return seeded(lambda: transformers.CLIPVisionModel(config))
