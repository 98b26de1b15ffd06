"""Caches stay empty in training, and copies of arguments share their tensors."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from atorch_ns.capture.caches import caches_off, can_be_written, copied_state, turn_off_caches

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
    paths, _ = turn_off_caches(model)
    assert paths[0] == ""
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
    assert turn_off_caches(model) == ([], [])


class Pair(NamedTuple):
    first: Any
    second: Any


class Store:
    def __init__(self) -> None:
        self.layers: list[Any] = [{"keys": torch.ones(2)}]
        self.model = nn.Linear(2, 2)
        self.itself = self


def test_a_copy_shares_tensors_and_modules_alone() -> None:
    store, tensor = Store(), torch.ones(3)
    made = copied_state(Pair([tensor], {"store": store}))
    assert isinstance(made, Pair)
    assert made.first[0] is tensor
    other = made.second["store"]
    assert other is not store
    assert other.itself is other
    assert other.model is store.model
    other.layers[0]["keys"] = other.layers.append(None)
    assert len(store.layers) == 1
    assert torch.equal(store.layers[0]["keys"], torch.ones(2))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(torch.ones(1), False), ((1, "a", None), False), (nn.Linear(1, 1), False), ([], True), ((1, {}), True)],
    ids=["tensor", "plain", "module", "list", "a dictionary in a tuple"],
)
def test_what_can_be_written(value: Any, expected: bool) -> None:
    assert can_be_written(value) is expected
