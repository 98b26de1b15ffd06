"""Optimizer states in host memory; on CPUs the copies are real, and the memory is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.estimate import Workload
from atorch_ns.estimate.memory.peak import price_memory
from atorch_ns.estimate.table import PlanTable
from atorch_ns.job import StepOptimizer
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case, accelerated_run, assert_parity, compare, reference_run
from atorch_ns.testing.workers import run_ranks
from opt_lib.optimizer_offload import OptimizerOffload

OFFLOAD = "optimizer_offload"


@pytest.fixture
def _used_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU's tensors were on a device of their own."""
    monkeypatch.setattr(OptimizerOffload, "unavailable", lambda self, config, cluster: None)


@pytest.mark.usefixtures("_used_on_cpu")
@pytest.mark.parametrize("others", [[], ["checkpoint"], [("gradient_accumulation", 2)]], ids=str)
def test_equals_one_process(others: list[Any]) -> None:
    case = get_case("tied_llama")
    assert_parity(compare(reference_run(case), accelerated_run(case, [OFFLOAD, *others])))


@pytest.mark.usefixtures("_used_on_cpu")
def test_replicated_equals_one_process() -> None:
    case = get_case("tied_llama")
    for trajectory in run_ranks(accelerated_run, 2, args=(case.name and case, ["ddp", OFFLOAD])):
        assert_parity(compare(reference_run(case), trajectory))


@pytest.mark.usefixtures("_used_on_cpu")
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_weights_are_copies_in_fp32_and_gradients_come_back(dtype: str | None) -> None:
    strategy = [OFFLOAD] if dtype is None else [OFFLOAD, ("half", dtype)]
    result = accelerate_case(get_case("mlp"), strategy)
    assert result.dataloader is not None
    result.train_step(next(iter(result.dataloader)))
    assert isinstance(result.optim, StepOptimizer)
    assert result.optim.masters is not None
    pairs = list(result.optim.masters.pairs())
    assert len(pairs) == len(list(result.model.parameters()))
    for parameter, master in pairs:
        assert master.dtype == torch.float32
        assert master.data_ptr() != parameter.data_ptr()
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert parameter.grad is not None, "until they are cleared, as in one process"
        assert parameter.grad.dtype == parameter.dtype
        assert master.grad is None


@pytest.mark.usefixtures("_used_on_cpu")
@pytest.mark.parametrize("others", [[], [("half", "bf16")]], ids=str)
def test_clipping_is_as_exact_as_without(others: list[Any]) -> None:
    case = get_case("mlp")
    norms = []
    for strategy in (
        [("half", {"dtype": "bf16", "master_weights": True})] if others else [],
        [OFFLOAD, *others],
    ):
        result = accelerate_case(case, strategy)
        batch = case.make_batch(8, 0)
        assert result.loss_func is not None
        result.loss_func(batch, case.call(result.model, batch)).backward()
        norms.append(float(result.clip_grad_norm_(0.1)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_on_a_cpu_it_is_left_out() -> None:
    with pytest.warns(
        UserWarning, match="optimizer_offload is left out: the model is in host memory already"
    ):
        accelerate_case(get_case("mlp"), [OFFLOAD])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("fsdp", "cpu_offload"),
        ("zero1", "cpu_offload"),
        (("amp_native", "fp16"), "use bf16"),
        ("pipeline_parallel", "norms of gradients"),
    ],
)
def test_what_it_cannot_stand_with(other: Any, reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        resolve(Strategy.load([OFFLOAD, other]), Cluster.detect(), load_registry())


def test_the_estimate_leaves_states_out_on_a_gpu() -> None:
    case = get_case("tied_llama")
    profile = profile_model(
        case.build(),
        case.make_batch(4, 0),
        lambda model, batch: case.loss_func(batch, case.call(model, batch)),
        find_dims,
        make_optimizer=torch.optim.AdamW,
    )
    assert profile.trace is not None
    plans = [Plan(), replace(Plan(), offload_optimizer=True)]
    workload = Workload(global_batch=4, num_tokens=profile.trace.num_tokens)
    there, _, _ = price_memory(PlanTable.of(plans), profile.trace, workload, device_type="cuda")
    here, _, _ = price_memory(PlanTable.of(plans), profile.trace, workload, device_type="cpu")
    assert there[0, 2] == here[0, 2] > 0
    assert there[1, 2] == 0
    assert here[1, 2] == here[0, 2]
