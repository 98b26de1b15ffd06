"""What a rank holds of a model: its share, and while a meta model is materialised one unit more.

Legend: W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns import Result, auto_accelerate
from atorch_ns.cluster import Cluster
from atorch_ns.testing.networks import ResidualMlp
from atorch_ns.testing.workers import run_ranks
from benchmarks._bytes import Allocated, StateBytes, allocated, state_bytes
from benchmarks.materialise import sizes_of

NUM_BLOCKS = 10
SCALARS = 20_000
"""Bytes for what is not part of the model: counters, messages, hash values."""


def _build() -> nn.Module:
    return ResidualMlp(width=128, hidden=256, num_blocks=NUM_BLOCKS)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _build()


WHOLE = sum(parameter.nbytes for parameter in _on_meta().parameters())


def _accelerate(model: nn.Module, strategy: Sequence[Any]) -> Result:
    _, result, _ = auto_accelerate(
        model,
        torch.optim.AdamW,
        loss_func=lambda batch, output: F.mse_loss(output, batch[1]),
        model_input_format="unpack_sequence",
        load_strategy=list(strategy),
    )
    assert result is not None
    return result


def _kept_after_a_step(strategy: Sequence[Any], gradients: bool) -> StateBytes:
    result = _accelerate(_build(), strategy)
    assert result.optim is not None
    batch = (torch.ones(4, 16), torch.ones(4, 8))
    result.train_step(batch)
    if gradients:  # the optimizer has stepped once, and these are fresh
        result.train_step.forward_backward(batch)
    return state_bytes(result.model, result.optim)


RANKS = (2, pytest.param(4, marks=pytest.mark.slow))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    ("strategy", "sharded"),
    [
        (["fsdp"], ("parameters", "gradients", "optimizer")),
        (["fsdp", "checkpoint"], ("parameters", "gradients", "optimizer")),
        (["zero2"], ("gradients", "optimizer")),
        (["zero1"], ("optimizer",)),
    ],
    ids=str,
)
def test_a_rank_keeps_its_share(strategy: Sequence[Any], sharded: tuple[str, ...], num_ranks: int) -> None:
    whole = {"parameters": WHOLE, "gradients": WHOLE, "optimizer": 2 * WHOLE}  # AdamW keeps two moments
    for kept in run_ranks(_kept_after_a_step, num_ranks, args=(strategy, True)):
        held = sum(getattr(kept, name) for name in sharded)
        assert held <= sum(whole[name] for name in sharded) / num_ranks * 1.05
        for name in whole.keys() - set(sharded):
            # zero2 gathers parameters for the time between forward and backward pass only.
            more = getattr(kept, name) - (WHOLE // num_ranks if strategy == ["zero2"] else whole[name])
            assert 0 <= more <= (1024 if name == "gradients" else 0)  # the reducer's numbers travel with them


@pytest.mark.parametrize("num_ranks", RANKS)
def test_shards_cover_the_model_once(num_ranks: int) -> None:
    ranks = run_ranks(_kept_after_a_step, num_ranks, args=(["fsdp"], False))
    assert sum(rank.parameters for rank in ranks) == WHOLE


def _largest_last(strategy: Sequence[Any]) -> int:
    sizes = [64] * 7 + [7 * 64]
    model = nn.Sequential(*(nn.Linear(64, size, bias=False) for size in sizes))
    _, result, _ = auto_accelerate(model, torch.optim.AdamW, load_strategy=list(strategy))
    assert result is not None
    assert result.optim is not None
    result.model(torch.ones(1, 64)).sum().backward()
    result.optim.step()
    return state_bytes(result.model, result.optim).optimizer


@pytest.mark.parametrize("zero", ["zero1", ("zero1", {"backend": "fairscale"})], ids=str)
def test_whole_parameters_are_dealt_out_evenly(zero: Any) -> None:
    if not isinstance(zero, str) and "fairscale" not in Cluster.detect().packages:
        pytest.skip("fairscale is not installed")
    moments = 2 * 14 * 64 * 64 * 4
    for optimizer_bytes in run_ranks(_largest_last, 2, args=([zero],)):
        assert optimizer_bytes == pytest.approx(moments / 2, abs=100)


def _materialised(strategy: Sequence[Any]) -> Allocated:
    model = _on_meta()
    return allocated(lambda: _accelerate(model, strategy))[1]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    "strategy", [["fsdp"], ["zero2", "checkpoint"], [("fsdp", {"sync_module_states": False})]], ids=str
)
def test_a_meta_model_takes_its_shard_and_one_unit(strategy: Sequence[Any], num_ranks: int) -> None:
    bound = sizes_of(_on_meta()).bound(num_ranks)
    assert bound < 0.7 * WHOLE  # or the test could not fail
    for seen in run_ranks(_materialised, num_ranks, args=(strategy,)):
        assert seen.peak <= bound * 1.1 + SCALARS
        assert seen.kept <= WHOLE / num_ranks * 1.05 + SCALARS


def _built_and_sharded() -> Allocated:
    return allocated(functools.partial(_sharded_from_scratch))[1]


def _sharded_from_scratch() -> Result:
    return _accelerate(_build(), ["fsdp"])


def test_a_model_with_memory_is_freed_once_it_is_sharded() -> None:
    for seen in run_ranks(_built_and_sharded, 2):
        assert seen.peak >= WHOLE
        assert seen.kept <= WHOLE / 2 * 1.05 + SCALARS
