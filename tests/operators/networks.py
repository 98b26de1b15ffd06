"""Models as users have them, small, with a batch: what the operators of a room's tests are captured from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

VOCABULARY = 64


def _ids(rows: int, tokens: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def _tokens(rows: int) -> dict[str, Any]:
    labels = _ids(rows)
    labels[:, :2] = -100  # as padding is marked
    return {"input_ids": _ids(rows), "labels": labels}


def llama(**settings: Any) -> nn.Module:
    """Two layers with grouped heads; attention that is written out, whose dropout is an operator of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    sizes |= {"attention_dropout": 0.1, "attn_implementation": "eager"}
    return LlamaForCausalLM(LlamaConfig(**sizes | settings))


def t5(**settings: Any) -> nn.Module:
    """Encoder and decoder of two layers with position biases and a tied embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "attn_implementation": "eager"}
    return T5ForConditionalGeneration(T5Config(**sizes | settings))


def mixtral(**settings: Any) -> nn.Module:
    """Two layers of four experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.1}
    return MixtralForCausalLM(MixtralConfig(**sizes | {"attn_implementation": "eager"} | settings))


def gpt2(**settings: Any) -> nn.Module:
    """Two layers with fused queries, keys and values, and a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": 16,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes | settings))


def opt(**settings: Any) -> nn.Module:
    """Two layers with learned positions."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "word_embed_proj_dim": 32}
    return OPTForCausalLM(OPTConfig(**sizes | settings))


def qwen2_moe(**settings: Any) -> nn.Module:
    """Two layers of four experts and a shared one."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= {"shared_expert_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes | settings))


def bert(**settings: Any) -> nn.Module:
    """Two layers and a classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return BertForSequenceClassification(
        BertConfig(**sizes | {"num_attention_heads": 4, "vocab_size": VOCABULARY} | settings)
    )


def _sentences(rows: int) -> dict[str, Any]:
    return {
        "input_ids": _ids(rows),
        "attention_mask": torch.ones(rows, 8).long(),
        "labels": torch.arange(rows) % 2,
    }


def vit(**settings: Any) -> nn.Module:
    """Two layers over sixteen patches."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    return ViTForImageClassification(ViTConfig(**sizes | settings))


def _images(rows: int) -> dict[str, Any]:
    pixels = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(rows))
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}


def whisper(**settings: Any) -> nn.Module:
    """Encoder with convolutions, and decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCABULARY}
    sizes |= {
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 16,
        "max_target_positions": 16,
    }
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(
        WhisperConfig(**sizes | {"suppress_tokens": None, "begin_suppress_tokens": None} | settings)
    )


def _speech(rows: int) -> dict[str, Any]:
    sound = torch.randn(rows, 8, 32, generator=torch.Generator().manual_seed(rows))
    return {"input_features": sound, "labels": _ids(rows)}


class ByHand(nn.Module):
    """Layers in a Python loop, an embedding that is also the head, a parameter that nothing uses, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.mix = nn.ParameterList([nn.Parameter(torch.randn(32, 32) / 6) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(32))
        self.unused = nn.Parameter(torch.ones(4))
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the logits."""
        x = self.embed(input_ids)
        for weight in self.mix:
            x = x + self.drop(torch.relu(x @ weight) * self.scale)
        logits = self.norm(x) @ self.embed.weight.t()
        loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
        return loss, logits


Build = Callable[[], nn.Module]
Batch = Callable[[int], dict[str, Any]]

NETWORKS: Mapping[str, tuple[Build, Batch]] = {
    "llama": (llama, _tokens),
    "t5": (t5, _tokens),
    "mixtral": (mixtral, _tokens),
    "gpt2": (gpt2, _tokens),
    "opt": (opt, _tokens),
    "qwen2_moe": (qwen2_moe, _tokens),
    "bert": (bert, _sentences),
    "vit": (vit, _images),
    "whisper": (whisper, _speech),
    "by_hand": (ByHand, _tokens),
}


def network(name: str, rows: int = 4) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode, with weights that are the same in every process, and a batch."""
    build, batch = NETWORKS[name]
    torch.manual_seed(11)
    model = build().train()
    for parameter in model.parameters():  # ones and zeros make wrong rules look right
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model, batch(rows)
