"""The optimizer around the user's: skipped steps, fp32 masters, and everything else passed on."""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as schedules
from torch import nn
from torch.optim.swa_utils import SWALR

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
        assert weight.grad.tolist() == [1.0, 1.0], "it stays until it is cleared"
        assert weight.grad.dtype == weight.grad_dtype == weight.dtype, (
            "backward passes and copies go on in 16 bits"
        )
        optimizer.zero_grad()
    assert float(masters.master_of(weight)[0]) == 1.0 - 4 * 2.0**-10
    assert float(weight[0]) == 1.0 - 2.0**-8, "the sum of what would each be lost"


def _with_masters(*weights: nn.Parameter, **options: Any) -> Any:
    masters = MasterWeights(weights)
    return StepOptimizer(
        torch.optim.SGD(masters.groups([{"params": weights, "lr": 1.0, **options}])), masters=masters
    )


def test_groups_show_the_model() -> None:
    weight, other = _weight(2.0, torch.bfloat16), _weight(dtype=torch.float16)
    optimizer = _with_masters(weight, other)
    (group,), (inner,) = optimizer.param_groups, optimizer.inner.param_groups
    assert isinstance(group["params"], list)
    assert [id(parameter) for parameter in group["params"]] == [id(weight), id(other)]
    assert inner["params"][0] is optimizer.masters.master_of(weight)
    with torch.no_grad():
        torch._foreach_mul_(group["params"], 2.0)
    for copied in (dict(group), {**group}, group.copy(), copy.copy(group)):
        assert type(copied) is dict
        assert copied["params"] == group["params"]
    assert repr(group) == repr(dict(group))
    for copied in (
        copy.deepcopy(group),
        pickle.loads(pickle.dumps(group)),
        copy.deepcopy(optimizer.param_groups)[0],
    ):
        assert copied["params"][0] is not weight
        assert copied["params"][0].tolist() == [4.0, 4.0]
        copied["lr"] = 3.0
    assert inner["lr"] == 1.0


def test_what_changes_in_groups_changes_the_inner_ones() -> None:
    weight, other = _weight(2.0, torch.bfloat16), _weight(dtype=torch.float16)
    optimizer = _with_masters(weight, other)
    (group,), (inner,) = optimizer.param_groups, optimizer.inner.param_groups
    masters = [optimizer.masters.master_of(each) for each in (weight, other)]

    def ids() -> list[int]:
        return [id(each) for each in inner["params"]]

    both, swapped, first = [*map(id, masters)], [*map(id, reversed(masters))], [id(masters[0])]
    group["lr"] = 2.0
    group.setdefault("initial_lr", 5.0)
    assert (inner["lr"], inner["initial_lr"], group.pop("initial_lr")) == (2.0, 5.0, 5.0)
    assert "initial_lr" not in inner
    for change, expected in (
        (lambda: group["params"].pop(-1), first),
        (lambda: group["params"].append(other), both),
        (lambda: operator.setitem(group, "params", group["params"][::-1]), swapped),
        (lambda: group.update(params=[weight]), first),
        (lambda: operator.setitem(group, "params", group["params"] + [other]), both),
        (lambda: operator.delitem(group["params"], 1), first),
        (lambda: operator.iadd(group["params"], [other]), both),
        (lambda: operator.delitem(group["params"], slice(None)), []),
        (lambda: group["params"].extend([weight, other]), both),
        (lambda: operator.setitem(group["params"], slice(None), [other, weight]), swapped),
        (lambda: group["params"].sort(key=lambda p: p is other), both),
        (lambda: group["params"].remove(weight), both[1:]),
        (lambda: group["params"].insert(0, weight), both),
    ):
        change()
        assert ids() == expected
    optimizer.param_groups.append({"params": [group["params"].pop()], "lr": 7.0})
    assert [id(each) for each in optimizer.inner.param_groups[1]["params"]] == both[1:]
    assert (optimizer.inner.param_groups[0], optimizer.inner.param_groups[1]["lr"]) == (inner, 7.0)
    del optimizer.param_groups[1]
    assert len(optimizer.inner.param_groups) == 1


@pytest.mark.parametrize(
    "make",
    [
        partial(schedules.StepLR, step_size=1),
        partial(schedules.OneCycleLR, max_lr=1.0, total_steps=9),
        partial(schedules.CyclicLR, base_lr=0.1, max_lr=1.0),
        partial(schedules.CosineAnnealingWarmRestarts, T_0=5),
        partial(schedules.ReduceLROnPlateau, patience=0, threshold=0.0),
        partial(SWALR, swa_lr=0.1),
        lambda optimizer: schedules.SequentialLR(
            optimizer,
            [schedules.LinearLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)],
            milestones=[1],
        ),
    ],
)
def test_schedules_reach_the_inner_groups(make: Callable[[Any], Any]) -> None:
    found = []
    for masters in (MasterWeights([]), None):
        weight = _weight()
        inner = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        optimizer = StepOptimizer(inner, masters=masters)
        schedule = make(optimizer)
        for _ in range(3):
            weight.grad = torch.ones(2)
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
        found.append((inner.param_groups[0]["lr"], inner.param_groups[0]["momentum"], weight.tolist()))
    assert found[0] == found[1]
    assert found[0][0] != 1.0


def test_gradients_are_of_the_model_whatever_the_optimizer_does_with_them() -> None:
    class Own(torch.optim.SGD):
        def double_grad(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = 2 * parameter.grad

        def halve_grad(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)

        def clear_grad(self) -> None:
            self.zero_grad()

    for on_host in (False, True):
        weight = _weight(1.0, torch.bfloat16)
        masters = MasterWeights([weight], on_host=on_host)
        optimizer: Any = StepOptimizer(Own(masters.groups([{"params": [weight]}]), lr=0.125), masters=masters)
        weight.grad = torch.ones_like(weight)
        optimizer.double_grad()
        assert weight.grad.tolist() == [2.0, 2.0]
        optimizer.halve_grad()
        assert weight.grad.tolist() == [1.0, 1.0]
        optimizer.step()
        assert list(optimizer.state) in ([], [weight])
        assert weight.tolist() == [0.875, 0.875]
        weight.sum().backward()
        optimizer.step()
        assert weight.tolist() == [0.625, 0.625], "gradients that are not cleared add up"
        optimizer.zero_grad(set_to_none=False)
        assert (weight.grad.tolist(), weight.grad.dtype) == ([0.0, 0.0], torch.bfloat16)
        weight.sum().backward()
        optimizer.clear_grad()
        assert weight.grad is None


def test_written_masters_are_refused() -> None:
    weight = _weight(dtype=torch.bfloat16)
    optimizer = _with_masters(weight)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.no_grad():
        optimizer.inner.param_groups[0]["params"][0].add_(1.0)
    with pytest.raises(StepError, match="fp32 copies of weights were written outside of its step"):
        optimizer.step()


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
