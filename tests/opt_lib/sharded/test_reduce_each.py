"""reduce_each_micro_batch: gradients of accumulated micro-batches, and what a rank holds between them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from atorch_ns import Result
from atorch_ns.cluster import Cluster
from atorch_ns.data.batch import call_model, split_batch
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks
from benchmarks._bytes import allocated
from tests.opt_lib.scenarios import AUTOCAST, Runs, Scenario, assert_equals_one_process, run_scenarios

KEY = "reduce_each_micro_batch"
HYBRID = ("parallel_mode", ([("zero", 2), ("data", 2)], None))
CLIPPED = {"global_batch": 12, "max_norm": 0.05}
BY_STEP = {"gradient_accumulation_steps": 3, "max_grad_norm": CLIPPED["max_norm"]}


def _micro_batches(result: Result, batch: Any) -> Any:
    """Runs three micro-batches of a plain loop one by one; gives their losses."""
    assert result.loss_func is not None
    parts = split_batch(result.prepare_input(batch, result.device), 3)
    for position, part in enumerate(parts):
        with nullcontext() if position == 2 else result.no_sync():
            output = call_model(result.model, part, result.job.inputs.model_input_format)
            loss = result.loss_func(part, output) / 3
            loss.backward()
        yield loss.detach()


def _by_hand(result: Result, batch: Any) -> torch.Tensor:
    assert result.optim is not None
    result.optim.zero_grad()
    loss = sum(_micro_batches(result, batch), torch.zeros(()))
    result.clip_grad_norm_(CLIPPED["max_norm"])
    result.optim.step()
    return result.mean(loss)


def _scenarios(*mesh: Any) -> dict[str, Scenario]:
    found = {}
    for method in ("fsdp", "zero2"):
        for wanted in (True, False):
            steps = [*mesh, (method, {KEY: wanted})]
            found[f"{method} {wanted}, train_step"] = Scenario("hf_gpt2", steps, BY_STEP, CLIPPED)
            found[f"{method} {wanted}, by hand"] = Scenario("tied_llama", steps, {"step": _by_hand}, CLIPPED)
    return found


ON_TWO = {
    **_scenarios(),
    "bf16": Scenario(
        "tied_llama",
        [("fsdp", {KEY: True}), ("amp_native", "bf16"), ("gradient_accumulation", 4)],
        {},
        AUTOCAST,
    ),
    "ignored and offloaded": Scenario(
        "tied_llama",
        [("fsdp", {KEY: True, "atorch_ignored_cls": "RMSNorm", "cpu_offload": True})],
        BY_STEP,
        CLIPPED,
    ),
    "pipeline": Scenario(
        "tied_llama",
        [("parallel_mode", ([("pipeline", 2)], None)), ("fsdp", {KEY: True}), ("gradient_accumulation", 4)],
        {},
        {"global_batch": 8},
    ),
}
ON_FOUR = {name: one for name, one in _scenarios(HYBRID).items() if "train_step" in name}


@pytest.fixture(scope="module")
def on_two() -> Runs:
    return run_scenarios(ON_TWO, 2)


@pytest.fixture(scope="module")
def on_four() -> Runs:
    return run_scenarios(ON_FOUR, 4)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_equal_one_process(name: str, on_two: Runs) -> None:
    assert_equals_one_process(ON_TWO[name], name, on_two)


@pytest.mark.parametrize("name", ON_FOUR)
def test_replicas_of_shards_equal_one_process(name: str, on_four: Runs) -> None:
    assert_equals_one_process(ON_FOUR[name], name, on_four)


Held = tuple[int, dict[str, torch.Tensor]]


def _held(strategy: list[Any]) -> Held:
    """Bytes of gradients that this rank keeps after the first micro-batch, and whole gradients after the last."""
    result = accelerate_case(get_case("hf_gpt2"), strategy, steps=1, global_batch=12)
    assert result.dataloader is not None
    passes = _micro_batches(result, next(iter(result.dataloader)))
    first, second = (allocated(lambda: float(next(passes)))[1].kept for _ in range(2))
    next(passes)
    found = {}
    for name, parameter in result.job.module.named_parameters():
        grad: Any = parameter.grad
        found[name] = grad.full_tensor()
    return first - second, found  # the second adds in place, and both keep results


def _all_held() -> dict[str, Held]:
    return {
        f"{method} {wanted}": _held([(method, {KEY: wanted})])
        for method in ("fsdp", "zero2")
        for wanted in (True, False)
    }


def test_a_rank_holds_its_share_of_gradients_or_all_and_they_are_those_of_one_process() -> None:
    case = get_case("hf_gpt2")
    model, batch = case.build(), case.make_batch(12, 0)
    case.loss_func(batch, case.call(model, batch)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for rank in run_ranks(_all_held, 2, timeout_s=110):
        for name, (kept, gradients) in rank.items():
            assert kept == (whole / 2 if "True" in name else whole), name
            assert gradients.keys() == expected.keys()
            for key, grad in gradients.items():
                torch.testing.assert_close(grad, expected[key], rtol=1e-4, atol=1e-6)


def _plan(config: Any, *others: Any) -> Plan:
    cluster = Cluster(world_size=2, local_world_size=2, distributed=True)
    return resolve(Strategy([*others, ("fsdp", config)]), cluster, load_registry()).plan


def test_open_settings_reduce_where_whole_gradients_would_take_more_than_a_quarter() -> None:
    num, memory = 1000, 16_000.0
    for config in ({}, {KEY: None}, {KEY: "auto"}):
        plan = _plan(config)
        assert plan == _plan({})
        assert not plan.reduces_each(num, memory)
        assert plan.reduces_each(num + 1, memory)
        assert plan.reduces_each(num, 0)  # of unknown size
    assert _plan({KEY: True}).reduces_each(1, memory)
    assert not _plan({KEY: False}).reduces_each(10**12, memory)
    half = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}
    assert not _plan(half).reduces_each(2 * num, memory)
    in_pipeline = _plan({KEY: True}, ("parallel_mode", ([("pipeline", 2)], None)))
    assert not in_pipeline.reduces_each(10**12, memory)
    assert not Plan().reduces_each(10**12, memory)  # nothing is sharded
