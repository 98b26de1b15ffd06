"""Traces on fake tensors against the same recorder on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.capture.random_states import caches_off
from atorch_ns.profile import profile_model
from atorch_ns.sharding import find_dims
from tests.profile.subjects import attempts, case_inputs, differences


def _bert() -> tuple[nn.Module, Any, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64
    )
    tokens = torch.randint(64, (8, 24))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.zeros(8, dtype=torch.int64),
    }
    return BertForSequenceClassification(config), batch, lambda model, batch: model(**batch).loss


def _vit() -> tuple[nn.Module, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=8,
        num_labels=5,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
    )
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.int64)}
    return ViTForImageClassification(config), batch, lambda model, batch: model(**batch).loss


@pytest.mark.parametrize("name", ["mlp", "tied_llama", "hf_llama", "hf_gpt2", "bert", "vit"])
def test_fake_is_real(name: str) -> None:
    made = {"bert": _bert, "vit": _vit}.get(name)
    model, batch, forward_loss = made() if made else case_inputs(name)
    trace = profile_model(model, batch, forward_loss, find_dims).trace
    assert trace is not None
    assert (trace.how, trace.notes) == ("fake", ())
    with caches_off(model):
        real = attempts(model, batch, forward_loss)._trace_real_steps(RuntimeError("asked for"))
    assert real.how == "real"
    # Both were traced with other batches: 8 and 4 really, a larger one on fake tensors.
    assert differences(trace.segments, real.segments, at=(8, 4)) == []


def test_padding_is_seen() -> None:
    """With padding a model keeps its mask, which it drops when there is none."""
    model, batch, forward_loss = case_inputs("hf_llama")
    padded = {**batch, "attention_mask": batch["attention_mask"].clone()}
    padded["attention_mask"][:, -3:] = 0
    saved = []
    for own in (batch, padded):
        trace = profile_model(model, own, forward_loss, find_dims, precisions=["float32"]).trace
        assert trace is not None
        saved.append(trace.segments[1].costs["float32"].saved.at(8))
        with caches_off(model):
            real = attempts(model, own, forward_loss, ["float32"])._trace_real_steps(
                RuntimeError("asked for")
            )
        assert differences(trace.segments, real.segments, at=(8,)) == []
    assert saved[1] > saved[0]
