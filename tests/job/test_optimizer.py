"""The optimizer around the user's: skipped steps, fp32 masters, and everything else passed on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.errors import StepError
from atorch_ns.job import LossScaling, StepOptimizer
from atorch_ns.job.loss import LossScaler
from atorch_ns.job.optimizer.step_optimizer import MasterWeights, inner_optimizer


def _weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value, dtype=dtype))


def test_small_updates_reach_16_bits_through_their_masters() -> None:
    weight = _weight(1.0, torch.bfloat16)
    masters = MasterWeights([weight])
    groups = masters.groups([{"params": [weight], "lr": 2.0**-10}])
    optimizer = StepOptimizer(torch.optim.SGD(groups), masters=masters)
    for _ in range(4):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert weight.grad is None, "the gradient is the master's"
        optimizer.zero_grad()
    assert float(masters.master_of(weight)[0]) == 1.0 - 4 * 2.0**-10
    assert float(weight[0]) == 1.0 - 2.0**-8, "the sum of what would each be lost"


def test_fp32_and_frozen_parameters_have_no_master() -> None:
    full, frozen, whole = _weight(), _weight(dtype=torch.float16).requires_grad_(False), torch.arange(2)
    masters = MasterWeights([full, frozen, whole])
    assert list(masters.pairs()) == []
    assert masters.master_of(full) is full
    on_host = MasterWeights([full], on_host=True)
    assert on_host.master_of(full) is not full
    assert torch.equal(on_host.master_of(full), full)


def test_another_optimizer_on_16_bit_weights_is_said() -> None:
    weight, full = _weight(1.0, torch.bfloat16), _weight()
    masters = MasterWeights([weight, full])
    optimizer = StepOptimizer(torch.optim.SGD(masters.groups([{"params": [weight, full]}])), masters=masters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight.grad, full.grad = torch.ones_like(weight), torch.ones(2)
        optimizer.step()
        torch.optim.SGD([full]).step()
        weight.grad = torch.ones_like(weight)
        with pytest.warns(UserWarning, match="updates 16-bit weights") as caught:
            torch.optim.SGD([weight]).step()
        assert caught[0].filename == __file__
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight]).step()  # said once


def test_an_optimizer_around_another_rounds_nothing() -> None:
    class Around(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            optimizer.step()

    weight = _weight(1.0, torch.bfloat16)
    masters = MasterWeights([weight])
    optimizer = StepOptimizer(torch.optim.SGD(masters.groups([{"params": [weight]}])), masters=masters)
    weight.grad = torch.ones_like(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Around([weight]).step()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_step_is_skipped_and_the_next_one_is_not(bad: float) -> None:
    weight = _weight()
    optimizer = StepOptimizer(torch.optim.SGD([weight], lr=1.0), skip_if_nonfinite=True)
    weight.grad = torch.tensor([bad, 1.0])
    optimizer.step()
    assert (optimizer.skipped, optimizer.num_skipped, weight.tolist()) == (True, 1, [1.0, 1.0])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert (optimizer.skipped, optimizer.num_skipped, weight.tolist()) == (False, 1, [0.0, 0.0])


def test_gradients_are_completed_once_a_step() -> None:
    weight = _weight()
    calls: list[str] = []
    optimizer = StepOptimizer(torch.optim.SGD([weight], lr=1.0), finish=lambda: calls.append("finish"))
    weight.grad = torch.ones(2)
    optimizer.prepare_gradients()  # as clipping does
    optimizer.step()
    assert calls == ["finish"]
    optimizer.step()
    assert calls == ["finish", "finish"]


def test_a_loss_that_was_not_scaled_is_an_error() -> None:
    weight = _weight()
    scaler = LossScaler("cpu", LossScaling())
    optimizer = StepOptimizer(torch.optim.SGD([weight], lr=1.0), scaler=scaler)
    weight.sum().backward()
    with pytest.raises(StepError, match=r"result\.loss_func\(batch, output\)"):
        optimizer.step()
    with pytest.raises(StepError, match="Use bf16"):
        optimizer.step(lambda: 0.0)


def test_the_rest_is_the_inner_optimizers() -> None:
    weight = _weight()
    inner = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    optimizer = StepOptimizer(inner)
    assert inner_optimizer(optimizer) is inner
    assert inner_optimizer(inner) is inner
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    weight.grad = torch.ones(2)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert "momentum_buffer" in optimizer.state[weight]
    assert optimizer.defaults["momentum"] == 0.9
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [_weight()]})
    assert len(inner.param_groups) == 2
    masters: Any = MasterWeights([_weight(dtype=torch.bfloat16)])
    with pytest.raises(StepError, match="after fp32 master weights"):
        StepOptimizer(inner, masters=masters).add_param_group({"params": [_weight()]})


def test_steps_of_fused_optimizers_are_skipped_without_a_call() -> None:
    """Which would take flags of a scaler, plain tensors, into one kernel with parameters that may be DTensors."""
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([weight], fused=True)
    optimizer = StepOptimizer(inner, scaler=LossScaler("cpu", LossScaling()))
    optimizer.scaler.scaled(weight.sum() * torch.inf).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer.skipped
    assert torch.equal(weight, torch.ones(2))
    assert not inner.state
