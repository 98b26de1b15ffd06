"""Attention that models write out as matrix products, under sequence_parallel: transformers as users have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.sequence_cases import check, strategy
from tests.opt_lib.test_sequence_parallel_bias import T5

pytestmark = pytest.mark.timeout(300)

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Ranks draw other masks than one process.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _case(name: str, make: Callable[[], nn.Module]) -> Case:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            model = make().train()
            for parameter in model.parameters():  # some are left uninitialised, and biases are zero
                nn.init.normal_(parameter, std=0.2)
            return model

    return dataclasses.replace(get_case("hf_llama"), name=name, build=build)


def _soft_cap() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**DECODER, query_pre_attn_scalar=8, sliding_window=6))


def _sinks() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**DECODER, **EXPERTS, sliding_window=6))


def _slopes() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


def _by_hand() -> nn.Module:
    from transformers import RoFormerConfig, RoFormerForMaskedLM

    return RoFormerForMaskedLM(RoFormerConfig(**SIZES, **NO_DROPOUT, intermediate_size=48))


def _one_bias() -> nn.Module:
    from transformers import MPNetConfig, MPNetForMaskedLM

    return MPNetForMaskedLM(
        MPNetConfig(**SIZES, **NO_DROPOUT, intermediate_size=48, max_position_embeddings=32)
    )


def _eager_t5() -> nn.Module:
    model: Any = T5.build()
    model.set_attn_implementation("eager")
    return model


SOFT_CAP, SINKS, SLOPES = _case("soft cap", _soft_cap), _case("sinks", _sinks), _case("slopes", _slopes)
BY_HAND, ONE_BIAS = _case("by hand", _by_hand), _case("one bias", _one_bias)
PAIRS = dataclasses.replace(T5, name="eager t5", build=_eager_t5)  # with a cross attention


def test_models_that_write_their_attention_out_train_as_in_one_process() -> None:
    models = (SOFT_CAP, SINKS, SLOPES, BY_HAND, ONE_BIAS, PAIRS)
    check(2, [(case, strategy("auto")) for case in models])


def test_heads_need_not_divide() -> None:
    check(3, [(case, strategy("auto", "checkpoint", sequence=3)) for case in (SOFT_CAP, SINKS)])


def _report() -> str:
    return str(accelerate_case(SINKS, strategy("auto")).applied)


def test_the_report_says_how() -> None:
    assert "attention by gather" in run_ranks(_report, 2)[0]
