"""Guards of random states, buffers and training modes, also where the block raises; caches in training."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from atorch_ns.capture.random_states import (
    buffers_and_generators_kept,
    caches_off,
    modes_kept,
    random_states_kept,
    save_generators,
    turn_off_caches,
)

CPU = torch.device("cpu")


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@random_states_kept(CPU)
def _draw_and_raise() -> None:
    _draw()
    raise ValueError("stop")


def test_a_block_that_draws_and_raises_changes_no_stream() -> None:
    with random_states_kept():
        expected = _draw()
        with pytest.raises(ValueError, match="stop"):
            _draw_and_raise()
    assert _draw() == expected


def test_saved_generators_draw_the_same_again() -> None:
    with random_states_kept():
        restore = save_generators(CPU)
        first = torch.rand(3)
        restore()
        assert torch.equal(torch.rand(3), first)


def test_buffers_are_restored_in_place_and_unchanged_ones_are_not_written() -> None:
    norm = nn.BatchNorm1d(2)
    running, version = norm.running_mean, norm.running_var._version  # type: ignore[union-attr]
    assert running is not None
    with buffers_and_generators_kept(norm, CPU):
        running.add_(1.0)
        norm.num_batches_tracked = torch.tensor(7)
    assert norm.running_mean is running
    assert torch.equal(running, torch.zeros(2))
    assert int(norm.num_batches_tracked) == 0
    assert norm.running_var._version == version  # type: ignore[union-attr]


def test_each_module_gets_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with modes_kept(model):
        model.eval()
        model[1].train()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


IDS = torch.arange(8).reshape(2, 4)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
}


def _llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return LlamaForCausalLM(config)


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(**SIZES, decoder_start_token_id=0))


@pytest.mark.parametrize("build", [_llama, _t5])
def test_only_passes_with_gradients_run_without_a_cache(build: Any) -> None:
    model = build()
    given = {"input_ids": IDS, "labels": IDS}
    assert model(**given).past_key_values is not None, "the default"
    before = copy.deepcopy(model.config.to_dict())
    assert turn_off_caches(model)
    assert model(**given).past_key_values is None
    assert copy.deepcopy(model)(**given).past_key_values is None
    assert model(**given, use_cache=True).past_key_values is not None, "the caller's word"
    with torch.no_grad():
        assert model(**given).past_key_values is not None
    assert model.config.to_dict() == before


def test_a_model_inside_another_is_found_and_hooks_go_again() -> None:
    model = nn.ModuleDict({"inner": _llama(), "head": nn.Linear(2, 2)})
    with caches_off(model):
        assert model["inner"](IDS).past_key_values is None
    assert model["inner"](IDS).past_key_values is not None
    model["inner"].config.use_cache = False
    assert not turn_off_caches(model)
