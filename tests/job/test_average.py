"""Averages of weights are those of ``AveragedModel`` in one process, whatever divides the weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from atorch_ns import checkpoint
from atorch_ns.errors import InputError
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.job.test_loops import (
    BATCH,
    EVERY,
    MASTERS,
    NEAR,
    TENSOR,
    Net,
    X,
    accelerated,
    batches,
    off_by,
    plain_step,
)

pytestmark = pytest.mark.processes
STRATEGIES = {**EVERY, "fp32 masters": ["fsdp", MASTERS]}


def _reference(decay: float | None) -> tuple[nn.Module, nn.Module]:
    """A model trained in one process, and its average."""
    model = Net()
    function = None if decay is None else get_ema_multi_avg_fn(decay)
    average = AveragedModel(model, multi_avg_fn=function)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in X.split(BATCH):
        optimizer.zero_grad()
        plain_step(model, batch)
        optimizer.step()
        average.update_parameters(model)
    return model, average.module


def _averaged(strategy: list[Any], decay: float | None) -> tuple[list[float | None], float, float]:
    """How far the average, what is trained on and an average that was read are off; losses in and after the average."""
    result = accelerated(Net(), strategy)
    average = result.average(decay)
    for _, batch in batches(result):
        result.train_step(batch)
        average.update()
    trained, expected = _reference(decay)
    with average.applied():
        off = [off_by(result, expected)]
        inside = float(result.train_step.evaluate(X[:8]))
    off.append(off_by(result, trained))
    another = result.average(decay)
    with another.applied():
        checkpoint.import_state_dict(result, expected.state_dict())
    with another.applied():
        off.append(off_by(result, expected))
    off.append(off_by(result, trained))
    return off, inside, float(result.train_step.evaluate(X[:8]))


@pytest.mark.parametrize("decay", [0.5, None])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_average_is_that_of_one_process(strategy: str, decay: float | None) -> None:
    off, inside, after = run_ranks(_averaged, 2, args=(STRATEGIES[strategy], decay), timeout_s=120)[0]
    near = 5e-2 if strategy == "fp32 masters" else NEAR
    assert max(one for one in off if one is not None) < near
    assert inside != after


def _averaged_by_torch() -> float:
    result = accelerated(Net(), TENSOR)
    average = AveragedModel(result.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _, batch in batches(result):
        result.train_step(batch)
        average.update_parameters(result.model)
    _, expected = _reference(0.5)
    sample = X[:8]
    with torch.no_grad():
        return float((average(sample) - expected(sample)).abs().max())


def test_torchs_average_of_divided_layers_is_that_of_one_process() -> None:
    assert max(run_ranks(_averaged_by_torch, 2, timeout_s=60)) < NEAR


def _copied(strategy: list[Any]) -> None:
    copy.deepcopy(accelerated(Net(), strategy).model)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_copy_of_sharded_weights_says_what_averages_them(strategy: str) -> None:
    for outcome in catch_ranks(partial(_copied, [strategy]), 2, timeout_s=60):
        assert isinstance(outcome.error, InputError)
        assert "result.average(decay)" in str(outcome.error)


def test_a_decay_is_a_share() -> None:
    with pytest.raises(InputError, match="a number from 0 to 1"):
        accelerated(Net(), []).average(1.5)
