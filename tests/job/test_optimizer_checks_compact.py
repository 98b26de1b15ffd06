"""Optimizers with states in 8 bits under every way of sharding, against what is predicted of them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.estimate.memory.states import kept_of, parameters_of, shares_of
from atorch_ns.job import state_bytes
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Profile, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import Case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks

FLAT = ("zero2", {"not_use_fsdp": True})
PLAIN: list[list[Any]] = [["ddp"], ["zero1"], [FLAT]]
"""Strategies whose optimizers see plain tensors."""
DTENSORS: list[list[Any]] = [["fsdp"], ["zero2"], ["fsdp", ("half", "fp16")], ["fsdp", "checkpoint"]]
PIPELINE = [("parallel_mode", ([("pipeline", 2)], None))]
HALF = ["fsdp", ("half", "bf16")]


class Block(nn.Module):
    """Two layers of which the larger has 16384 elements: divided by two still enough for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + down


def _build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), *(Block() for _ in range(3)), nn.Linear(64, 7))


def _batch(size: int, seed: int) -> torch.Tensor:
    batch: torch.Tensor = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    return batch


CASE = Case(
    name="wide",
    build=_build,
    make_batch=_batch,
    loss_func=lambda batch, output: output.square().mean(),
    model_input_format=None,
    block="Block",
)


def _optimizer(package: str) -> Callable[..., torch.optim.Optimizer]:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    module = importlib.import_module(f"{package}.optim")
    found: Callable[..., torch.optim.Optimizer] = module.AdamW8bit
    return found


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """torchao compiles its update, which takes ten seconds; ranks are forked from this process."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _train(strategies: Sequence[list[Any]], optimizer: Any) -> list[tuple[list[float], int] | str]:
    """Losses and bytes of states on this rank, or the error's text."""
    found: list[tuple[list[float], int] | str] = []
    for strategy in strategies:
        try:
            result = accelerate_case(CASE, strategy, optim_func=optimizer, optim_args={"lr": 1e-3})
            assert result.dataloader is not None
            losses = [float(result.train_step(batch)) for batch in result.dataloader]
            found.append((losses, state_bytes(result).optimizer))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _profile(optimizer: Any) -> Profile:
    return profile_model(
        CASE.build(),
        CASE.make_batch(4, 0),
        lambda model, batch: CASE.loss_func(batch, CASE.call(model, batch)),
        find_dims,
        make_optimizer=partial(optimizer, lr=1e-3),
    )


def _predicted(strategy: list[Any], profile: Profile, num_ranks: int) -> int:
    from dataclasses import replace

    assert profile.trace is not None
    cluster = replace(
        Cluster.detect(), world_size=num_ranks, local_world_size=num_ranks, distributed=num_ranks > 1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = resolve(Strategy.load(strategy), cluster, load_registry(), profile=profile).plan
    optimizer, parameters = profile.trace.optimizer, parameters_of(profile.trace, plan)
    shares = shares_of(plan, parameters, optimizer, np.asarray([num_ranks]))
    return int(kept_of(plan, parameters, shares, optimizer).optimizer[0])


@pytest.mark.parametrize("package", [pytest.param("torchao", marks=pytest.mark.slow), "bitsandbytes"])
def test_trains_as_one_process_and_keeps_what_was_predicted(package: str) -> None:
    optimizer = _optimizer(package)
    profile = _profile(optimizer)
    (alone,) = _train([[]], optimizer)
    assert not isinstance(alone, str), alone
    losses, kept = alone
    assert kept == _predicted([], profile, 1)
    full = 8 * sum(parameter.numel() for parameter in CASE.build().parameters())
    assert kept < 0.35 * full
    strategies = [*PLAIN, PIPELINE, *(DTENSORS if package == "torchao" else [])]
    ranks = run_ranks(_train, 2, args=(strategies, optimizer), timeout_s=100)
    for strategy, *found in zip(strategies, *ranks, strict=True):
        for one in found:
            assert not isinstance(one, str), (strategy, one)
            assert one[0] == pytest.approx(losses, rel=5e-3), strategy
        if strategy is PIPELINE:  # what a stage keeps is another question
            continue
        most = max(one[1] for one in found)
        assert most == _predicted(strategy, profile, 2), strategy


@pytest.mark.parametrize(
    ("package", "strategy", "reason"),
    [
        ("bitsandbytes", ["fsdp"], "bitsandbytes.optim.AdamW8bit cannot update DTensors"),
        ("torchao", HALF, "torchao.optim.AdamW8bit cannot update DTensors in 16 bits"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(package: str, strategy: list[Any], reason: str) -> None:
    optimizer = _optimizer(package)
    for found in run_ranks(_train, 2, args=([strategy], optimizer), timeout_s=100):
        assert isinstance(found[0], str)
        assert reason in found[0]
        assert "Use" in found[0]
