"""Jobs whose ranks hold parts of the model: sums of gradients, norms, evaluation, random states, whole weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from atorch_ns.job import SharedRandomness
from atorch_ns.testing.models import SyntheticDataset
from atorch_ns.testing.parity import (
    Trajectory,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
    whole_parameters,
)
from atorch_ns.testing.workers import run_ranks
from tests.job.divided import CASE, build, local, make

ACCUMULATE = ("gradient_accumulation", 2)
TWO: dict[str, tuple[dict[str, int], list[Any]]] = {
    "tensor": ({"tensor": 2}, []),
    "tensor accumulated": ({"tensor": 2}, [ACCUMULATE]),
    "tensor recomputed": ({"tensor": 2}, ["checkpoint"]),
    "pipeline": ({"pipeline": 2}, [ACCUMULATE]),
}
FOUR: dict[str, tuple[dict[str, int], list[Any]]] = {
    "tensor x data": ({"tensor": 2, "data": 2}, [ACCUMULATE]),
    "tensor x zero": ({"tensor": 2, "zero": 2}, ["fsdp"]),
    "pipeline x data": ({"pipeline": 2, "data": 2}, []),
    "pipeline x zero": ({"pipeline": 2, "zero": 2}, ["fsdp", ACCUMULATE]),
    "tensor x pipeline": ({"tensor": 2, "pipeline": 2}, [ACCUMULATE]),
}


def _train(axes: dict[str, int], methods: list[Any]) -> Trajectory:
    result = make(axes, methods, max_grad_norm=0.5)
    initial = whole_parameters(result)
    losses = [float(result.train_step(batch)) for batch in result.dataloader]
    return Trajectory(losses=losses, initial=initial, final=whole_parameters(result))


def _train_all(plans: dict[str, tuple[dict[str, int], list[Any]]]) -> dict[str, Trajectory]:
    return {name: _train(*plan) for name, plan in plans.items()}


@pytest.mark.parametrize(("plans", "num_ranks"), [(TWO, 2), (FOUR, 4)], ids=["2", "4"])
def test_parity_with_clipping(plans: Any, num_ranks: int) -> None:
    """A sum, a norm or a weight in the wrong order would each be an error of 1e-2 or more."""
    reference = reference_run(CASE, max_norm=0.5)
    ranks = run_ranks(_train_all, num_ranks, args=(plans,), timeout_s=60)
    for name in plans:
        try:
            assert_parity(compare(reference, ranks[0][name]))
            assert_ranks_agree([rank[name] for rank in ranks])
            assert compare(reference, ranks[0][name]).initial_error == 0.0
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _plain_loop() -> Trajectory:
    result = make({"tensor": 2})
    initial, losses = whole_parameters(result), []
    for batch in result.dataloader:
        result.optim.zero_grad()
        loss = result.loss_func(batch, result.model(*batch))
        loss.backward()
        result.optim.step()
        losses.append(float(loss.detach()))
    return Trajectory(losses=losses, initial=initial, final=whole_parameters(result))


def test_sums_are_made_by_the_optimizer_in_a_plain_loop() -> None:
    ranks = run_ranks(_plain_loop, 2)
    assert_parity(compare(reference_run(CASE), ranks[0]))
    assert_ranks_agree(ranks)


def _whole_gradients(result: Any) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in result.model.named_parameters()
    }


def _accumulated_twice(axes: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    """Gradients of one batch, and of the same batch twice: the second sum meets gradients that are summed."""
    result = make(axes)
    batch = next(iter(result.dataloader))
    result.train_step.forward_backward(batch)
    result.train_step.reduce()
    once = _whole_gradients(result)
    result.train_step.forward_backward(batch)
    result.train_step.reduce()
    return [once, _whole_gradients(result)]


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_gradients_add_up_over_calls(axes: dict[str, int]) -> None:
    for once, twice in run_ranks(_accumulated_twice, 2, args=(axes,)):
        for name, gradient in once.items():
            torch.testing.assert_close(
                twice[name], 2 * gradient, msg=lambda text, name=name: f"{name}: {text}"
            )


NORM_TYPES = (2.0, 1.0, math.inf)


def _norms(axes: dict[str, int], methods: list[Any]) -> list[tuple[float, float]]:
    result, found = make(axes, methods), []
    batch = next(iter(result.dataloader))
    for norm_type in NORM_TYPES:
        result.optim.zero_grad()
        result.train_step.forward_backward(batch)
        before = result.clip_grad_norm_(0.01, norm_type)
        found.append((float(before), float(result.clip_grad_norm_(1e9, norm_type))))
    return found


def _all_norms(plans: dict[str, tuple[dict[str, int], list[Any]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: _norms(*plan) for name, plan in plans.items()}


@pytest.mark.parametrize(("plans", "num_ranks"), [(TWO, 2), (FOUR, 4)], ids=["2", "4"])
def test_norms_are_those_of_one_process(plans: Any, num_ranks: int) -> None:
    """Also of a parameter that is the largest part of the norm and on two stages: it counts once."""
    model, batch = CASE.build(), SyntheticDataset(CASE, 40).batch(0, 8)
    CASE.loss_func(batch, CASE.call(model, batch)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    expected = [float(torch.nn.utils.get_total_norm(gradients, norm_type)) for norm_type in NORM_TYPES]
    for rank in run_ranks(_all_norms, num_ranks, args=(plans,), timeout_s=60):
        for name, found in rank.items():
            assert [before for before, _ in found] == pytest.approx(expected, rel=1e-5), name
            assert [after for _, after in found] == pytest.approx([0.01] * 3, rel=1e-3), name


def _evaluated(axes: dict[str, int], methods: list[Any]) -> list[Any]:
    result = make(axes, methods, case=replace(CASE, build=lambda: build(dropout=0.3)))
    plain = make(axes, methods)
    batch = next(iter(result.dataloader))
    frozen = next(module for module in result.model.modules() if isinstance(module, torch.nn.Dropout))
    frozen.eval()
    first, second = result.train_step.evaluate(batch), result.train_step.evaluate(batch)
    modes = [module.training for module in result.model.modules() if module is not frozen]
    assert all(modes)
    assert not frozen.training
    gradients = [p.grad for p in result.model.parameters() if p.grad is not None]
    return [float(first), float(second), float(plain.train_step(batch)), len(gradients)]


def _all_evaluated(plans: dict[str, tuple[dict[str, int], list[Any]]]) -> dict[str, list[Any]]:
    return {name: _evaluated(*plan) for name, plan in plans.items()}


@pytest.mark.parametrize(("plans", "num_ranks"), [(TWO, 2), (FOUR, 4)], ids=["2", "4"])
def test_evaluate_gives_the_loss_and_leaves_all_as_it_was(plans: Any, num_ranks: int) -> None:
    for rank in run_ranks(_all_evaluated, num_ranks, args=(plans,), timeout_s=60):
        for name, (first, second, trained, num_gradients) in rank.items():
            assert first == second, name
            assert first == pytest.approx(trained, abs=1e-6), name
            assert num_gradients == 0, name


def _with_dropout(axes: dict[str, int], methods: list[Any]) -> tuple[Trajectory, bool]:
    """Ranks that the user has seeded differently; and whether the user's random state is as it was."""
    result = make(axes, methods, case=replace(CASE, build=lambda: build(dropout=0.3)))
    torch.manual_seed(dist.get_rank())
    batches = list(result.dataloader)  # a loader that begins draws a number
    before, initial = torch.get_rng_state(), whole_parameters(result)
    losses = [float(result.train_step(batch)) for batch in batches]
    run = Trajectory(losses=losses, initial=initial, final=whole_parameters(result))
    return run, torch.equal(before, torch.get_rng_state())


def _all_with_dropout() -> list[tuple[Trajectory, bool]]:
    return [_with_dropout({"tensor": 2}, methods) for methods in ([], ["checkpoint"])]


def test_dropout_agrees_over_the_ranks_of_one_model() -> None:
    ranks = run_ranks(_all_with_dropout, 2)
    for position in range(2):
        assert_ranks_agree([rank[position][0] for rank in ranks])
        assert all(rank[position][1] for rank in ranks)
    report = compare(ranks[0][0][0], ranks[0][1][0])  # recomputation draws the masks again
    assert_parity(report)
    assert compare(reference_run(CASE), ranks[0][0][0]).max_param_error > 0.1  # there are masks


def test_passes_and_data_draw_differently() -> None:
    def draws(data_rank: int) -> list[torch.Tensor]:
        shared = SharedRandomness(seed=7, data_rank=data_rank, device=torch.device("cpu"))
        outer = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Dropout()))
        shared.attach([outer, outer[0]])
        saved = shared.state()
        found = [outer(torch.ones(64)), outer(torch.ones(64))]
        shared.restore(saved)
        assert torch.equal(outer(torch.ones(64)), found[0])
        return found

    found = [*draws(0), *draws(1)]
    assert len({tuple(mask.tolist()) for mask in found}) == len(found)
    assert torch.equal(found[0], draws(0)[0])


def test_an_error_in_a_forward_pass_gives_the_random_state_back() -> None:
    shared = SharedRandomness(seed=7, data_rank=0, device=torch.device("cpu"))
    module = torch.nn.Linear(2, 2)
    shared.attach([module])
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())
    module(torch.ones(2))
    assert torch.equal(before, torch.get_rng_state())


HALVES: dict[str, tuple[dict[str, int], list[Any]]] = {
    f"{axis} {method} {dtype}": ({axis: 2}, [ACCUMULATE, (method, dtype)])
    for axis in ("tensor", "pipeline")
    for method, dtype in (("half", "fp16"), ("half", "bf16"), ("amp_native", "fp16"), ("amp_native", "bf16"))
}


def test_reduced_precision() -> None:
    """fp16 scales the loss where it is computed, and its masters lie in parts as the weights do."""
    ranks = run_ranks(_train_all, 2, args=(HALVES,), timeout_s=60)
    reference = reference_run(CASE, max_norm=0.5)
    for name in HALVES:
        assert_ranks_agree([rank[name] for rank in ranks])
        param_tol = 1.0 if "half bf16" in name else 0.15  # weights near 1 move by steps of 1/128 then
        assert_parity(compare(reference, ranks[0][name]), param_tol=param_tol, loss_tol=2e-2)


def _overflowing(axes: dict[str, int]) -> tuple[bool, bool, float]:
    """A step with an infinite gradient in one rank's part only; whether it is skipped, and the scale afterwards."""
    result = make(axes, [("half", "fp16")])
    batch = next(iter(result.dataloader))
    before = whole_parameters(result)
    result.train_step.forward_backward(batch)
    if dist.get_rank() == 1:
        parts = [p for p in result.model.parameters() if p.grad is not None]
        local(parts[0].grad).data.fill_(math.inf)  # without the trace of a write, which a step would refuse
    result.optim.step()
    unchanged = all(torch.equal(value, before[name]) for name, value in whole_parameters(result).items())
    return result.train_step.skipped, unchanged, result.optim.scaler.scaler.get_scale()


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_all_ranks_skip_a_step_that_one_part_overflows(axes: dict[str, int]) -> None:
    assert run_ranks(_overflowing, 2, args=(axes,)) == [(True, True, 2.0**15)] * 2
