"""sequence_parallel trains as one process does, and refuses what it cannot divide."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, RankError, StrategyError
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.networks import DecoderBlock, TiedLlama
from atorch_ns.testing.parity import accelerate_case, assert_ranks_agree, reference_run
from atorch_ns.testing.workers import run_ranks
from benchmarks._storages import measure_peak
from tests.opt_lib.sequence_cases import KINDS, check, cut, padded, strategy, train

TWO = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")


@pytest.mark.parametrize("kind", KINDS)
def test_odd_lengths_and_padding(kind: str) -> None:
    """Every model, as it is: ``tests/parity/test_model_axes.py``."""
    cases = [cut("tied_llama", 13), cut("hf_gpt2", 3), padded("hf_llama")]
    check(2, [(case, strategy(kind)) for case in cases])


def _with_dropout() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config).train()


def test_dropout_keeps_ranks_together() -> None:
    case = dataclasses.replace(get_case("hf_gpt2"), build=_with_dropout)
    case.build()
    found = run_ranks(train, 2, args=([(case, strategy("ulysses", "checkpoint"))], {}))
    assert_ranks_agree([trajectories[0] for trajectories in found])
    plain, again = (reference_run(case) for _ in range(2))
    assert max(abs(x - y) for x, y in zip(plain.losses, found[0][0].losses, strict=True)) < 0.3
    assert plain.losses[0] == pytest.approx(again.losses[0], abs=0.3)


def test_parallel_mode_alone_is_enough() -> None:
    resolved = resolve(Strategy([("parallel_mode", ([("sequence", 2)], None))]), TWO, load_registry())
    assert "sequence_parallel" in [item.method.name for item in resolved.chosen]
    assert resolved.plan.size("sequence") == 2
    ring = resolve(Strategy(strategy("ring")), TWO, load_registry())
    assert ring.plan.sequence.exchange == "ring"


def _message(case: Case, steps: Any) -> str:
    with pytest.raises((InputError, StrategyError)) as caught:
        accelerate_case(case, steps)
    return str(caught.value)


def _messages() -> list[str]:
    tied = get_case("tied_llama")
    odd = dataclasses.replace(tied, build=lambda: TiedLlama(num_heads=1))
    return [
        _message(get_case("mlp"), strategy("auto")),
        _message(odd, strategy("ulysses")),
        _message(tied, strategy("auto", blocks=["DecoderBlok"])),
        _message(tied, strategy("auto", blocks=["embed_tokens"])),
        _message(tied, strategy("stripes")),
    ]


def test_what_cannot_be_divided_is_refused_before_training() -> None:
    (mlp, heads, missing, tied, kind), _ = run_ranks(_messages, 2)
    assert "blocks.0 (ResidualBlock)" in mlp
    assert "1 attention heads over sequence=2" in heads
    assert "DecoderBlok" in missing
    assert "Set sequence_dim" in tied
    assert "ulysses" in kind


class FailsOnOneRank(DecoderBlock):
    """Runs whole everywhere; then rank 1 fails."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, D]."""
        type(self).calls += 1
        if dist.is_initialized() and dist.get_rank() == 1 and type(self).calls > 1:
            raise ZeroDivisionError("on this rank alone")
        return super().forward(x)


def _fails_on_one_rank() -> nn.Module:
    model = get_case("tied_llama").build()
    for block in model.layers:  # type: ignore[union-attr]
        block.__class__ = FailsOnOneRank
    return model


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))


def _self_tests_that_fail() -> tuple[list[str], float]:
    begun = time.monotonic()
    messages = []
    for case in (
        dataclasses.replace(get_case("tied_llama"), build=_fails_on_one_rank),
        dataclasses.replace(get_case("hf_llama"), build=_mamba),
    ):
        with pytest.raises((InputError, RankError)) as caught:
            accelerate_case(case, strategy("auto"))
        messages.append(str(caught.value))
    return messages, time.monotonic() - begun


def test_a_self_test_that_fails_on_one_rank_ends_on_all() -> None:
    _mamba()
    ranks = run_ranks(_self_tests_that_fail, 2, timeout_s=50)
    for (alone, mamba), seconds in ranks:
        assert "on this rank alone" in alone
        assert "MambaBlock" in mamba
        assert seconds < 30
    assert "rank 1" in ranks[0][0][0]


def _auto() -> str:
    case = dataclasses.replace(get_case("tied_llama"), build=lambda: TiedLlama(num_heads=1))
    return str(accelerate_case(case, strategy("auto")).applied)


def test_auto_takes_a_ring_where_heads_do_not_divide() -> None:
    (report, _) = run_ranks(_auto, 2)
    assert "4 block(s) on 1/2 of each sequence, attention by ring" in report


NUM_TOKENS = 512


def _long_samples(batch_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, (batch_size, NUM_TOKENS), generator=generator)


def _activations(steps: Any) -> int:
    """Peak bytes without those of weights, gradients and the optimizer."""
    case = dataclasses.replace(
        get_case("tied_llama"), make_batch=_long_samples, build=lambda: TiedLlama(width=64, hidden=192)
    )
    peak = measure_peak(
        lambda: accelerate_case(case, steps, steps=3, global_batch=2),
        (_long_samples(2, seed) for seed in range(4)),
    )
    states = peak.states
    return peak.peak_bytes - states.parameters - states.gradients - states.optimizer


def _activations_of_each() -> list[int]:
    return [_activations(strategy(kind)) for kind in KINDS]


def test_activations_are_halved() -> None:
    (whole,) = run_ranks(_activations, 1, args=([("parallel_mode", ([("data", 1)], None))],))
    for parts in run_ranks(_activations_of_each, 2, timeout_s=100):
        assert max(parts) < 0.58 * whole  # embeddings and logits stay whole
