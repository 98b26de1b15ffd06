"""Models of transformers from small configs; importing this module imports none of it."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

__all__ = ["IMAGE_SHAPE", "make_bert", "make_gpt2", "make_llama", "make_mixtral", "make_vit"]

IMAGE_SHAPE: Final = (3, 12, 20)
"""Channels, height and width: 15 patches, and with the class token 16 tokens, which 2, 4 and 8 ranks can share."""
_PATCH: Final = 4

# With transformers' default of 0.02 attention starts uniform, and the gradients of queries and keys drown in
# rounding; with 1/sqrt(width) the logits are so large that bf16 rounds the loss by 1e-3.
_INITIALIZER_RANGE: Final = 0.1


def make_llama(vocab_size: int) -> nn.Module:
    """Two layers, four heads and two of keys and values, a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=False,
        use_cache=False,
        attention_dropout=0.0,
    )
    return LlamaForCausalLM(config)


def make_gpt2(vocab_size: int) -> nn.Module:
    """Two layers, four heads, tied weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=32,
        n_inner=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=_INITIALIZER_RANGE,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def make_bert(vocab_size: int) -> nn.Module:
    """Two layers, four heads; the head of the masked language model is tied to the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=_INITIALIZER_RANGE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _with_biases(BertForMaskedLM(config))


def make_vit(num_labels: int) -> nn.Module:
    """Two layers, four heads, images of :data:`IMAGE_SHAPE`."""
    from transformers import ViTConfig, ViTForImageClassification

    channels, *size = IMAGE_SHAPE
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=size,
        patch_size=_PATCH,
        num_channels=channels,
        initializer_range=_INITIALIZER_RANGE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = num_labels
    return _with_biases(ViTForImageClassification(config))


def make_mixtral(vocab_size: int) -> nn.Module:
    """Two layers with four experts, of which every token uses two; the loss leaves the router's balance out."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=_INITIALIZER_RANGE,
        output_router_logits=False,
        router_jitter_noise=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        attention_dropout=0.0,
    )
    return MixtralForCausalLM(config)


def _with_biases(model: nn.Module) -> nn.Module:
    """Biases other than zero: one that a rank adds twice is seen at once, and one that has no gradient (of keys,
    to which a softmax is blind) still moves by its decay, so that its update is a measure."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.add_(_INITIALIZER_RANGE * torch.randn_like(parameter))
    return model
