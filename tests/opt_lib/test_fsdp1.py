"""fsdp and zero2 with version 1 train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import assert_parity, assert_ranks_agree, compare, snapshot
from atorch_ns.testing.runs import accelerate_case, plain_loop_step
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import (
    AUTOCAST,
    AUTOCAST_FP16,
    Runs,
    Scenario,
    accumulating_step,
    assert_equals_one_process,
    assert_norms,
    bad_step,
    error_of,
    norms,
    run_scenarios,
    scheduled,
    two_groups,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*cpu_offload is not used.*")

V1 = {"version": 1}
FSDP: tuple[str, dict[str, Any]] = ("fsdp", V1)
CLIPPED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}
OTHER_SETTINGS = {
    **V1,
    "forward_prefetch": True,
    "backward_prefetch": "BACKWARD_POST",
    "limit_all_gathers": False,
    "sync_module_states": False,
    "cpu_offload": True,
}
IGNORED = ("fsdp", {**V1, "atorch_ignored_cls": "RMSNorm"})
FP16 = ("amp_native", {"dtype": "fp16", "init_scale": 256.0})
MESH = ("parallel_mode", ([("zero", 2), ("data", 2)], None))


def _frozen_but_attention(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention." in name)
    return model


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


ON_TWO = {
    **{f"{case}-{name}": Scenario(case, [(name, V1)]) for case in ("mlp", "tied_llama", "hf_llama") for name in ("fsdp", "zero2")},
    "shard_grad_op": Scenario("mlp", [("fsdp", {**V1, "sharding_strategy": "SHARD_GRAD_OP"})]),
    "flat": Scenario("tied_llama", [("fsdp", {**V1, "use_orig_params": False})]),
    "clipped": Scenario("tied_llama", [FSDP], CLIPPED, {"max_norm": 0.05}),
    "plain": Scenario("tied_llama", [("fsdp", OTHER_SETTINGS)], {"step": plain_loop_step}),
    "accumulating": Scenario("tied_llama", [FSDP], {"step": accumulating_step}),
    "recomputed": Scenario("hf_llama", [FSDP, "checkpoint"]),
    "by-class": Scenario("hf_llama", [("fsdp", {**V1, "atorch_wrap_cls": ("LlamaMLP", "LlamaDecoderLayer")})]),
    "by-size": Scenario("tied_llama", [("fsdp", {**V1, "atorch_size_based_min_num_params": 1000})]),
    "ignored": Scenario("tied_llama", [IGNORED]),
    "ignored-clipped": Scenario("tied_llama", [IGNORED], CLIPPED, {"max_norm": 0.05}),
    "groups": Scenario(
        "tied_llama", [FSDP, "checkpoint"], {"optim_param_func": two_groups}, {"optim_param_func": two_groups}
    ),
    "outmost": Scenario(
        "tied_llama",
        [("fsdp", {**V1, "wrap_trainable_outmost": True})],
        {"model": _frozen_but_attention(get_case("tied_llama").build())},
        {"prepare": _frozen_but_attention, "optim_param_func": _trainable},
    ),
    "bf16": Scenario("hf_llama", [FSDP, ("amp_native", "bf16")], {}, AUTOCAST),
    "fp16": Scenario("mlp", [FSDP, FP16], {}, AUTOCAST_FP16),
}  # fmt: skip
ON_FOUR = {
    "hybrid": Scenario("tied_llama", [FSDP, MESH], CLIPPED, {"max_norm": 0.05}),
    "hybrid-zero2": Scenario("hf_llama", [("zero2", V1), MESH]),
    "zero-axis": Scenario("mlp", [FSDP, ("parallel_mode", ([("zero", 4)], None))]),
}


@pytest.fixture(scope="module")
def on_two() -> Runs:
    return run_scenarios(ON_TWO, 2)


@pytest.fixture(scope="module")
def on_four() -> Runs:
    return run_scenarios(ON_FOUR, 4)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_equal_one(name: str, on_two: Runs) -> None:
    assert_equals_one_process(ON_TWO[name], name, on_two)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one(name: str, on_four: Runs) -> None:
    assert_equals_one_process(ON_FOUR[name], name, on_four)


def test_the_norm_is_that_of_one_process_and_clipping_takes_effect() -> None:
    for rank in run_ranks(norms, 2, args=([FSDP],)):
        assert_norms(rank)


def _bad_steps() -> list[Any]:
    skipping = ("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True})
    return [bad_step([FSDP, FP16]), bad_step([FSDP, skipping])]


def test_all_ranks_skip_a_step_that_one_cannot_take() -> None:
    assert run_ranks(_bad_steps, 2) == [[(True, True, False, True)] * 2] * 2


def test_a_scheduler_drives_it_and_a_dry_run_leaves_nothing() -> None:
    runs = run_ranks(scheduled, 2, args=([FSDP],))
    assert_ranks_agree(runs)
    assert_parity(compare(scheduled([]), runs[0]))


def _initial(strategy: list[Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    with torch.device("meta"):
        model = get_case("hf_llama").build()
    _, result, _ = auto_accelerate(model, load_strategy=strategy)
    assert result is not None
    assert result.report.num_parameters == 22688
    return snapshot(result.model)


@pytest.mark.filterwarnings("ignore:.*left out.*")
def test_a_model_on_meta_gets_the_values_of_any_other_strategy() -> None:
    alone = _initial([])
    for rank in run_ranks(_initial, 2, args=([("fsdp", {**V1, "atorch_ignored_cls": "LlamaRMSNorm"})],)):
        assert rank.keys() == alone.keys()
        assert all(torch.equal(rank[name], alone[name]) for name in alone)


def _refused(strategy: list[Any], arguments: dict[str, Any]) -> str:
    return error_of(lambda: accelerate_case(get_case("tied_llama"), strategy, **arguments))


@pytest.mark.parametrize(
    ("strategy", "arguments", "said"),
    [
        (
            [("fsdp", {**V1, "use_orig_params": False})],
            {"optim_param_func": two_groups},
            "InputError: use_orig_params=False",
        ),
        (
            [FSDP],
            {"optim_func": torch.optim.Adafactor, "optim_args": {"lr": 1e-2}},
            "BackendError: FullyShardedDataParallel updates flat pieces",
        ),
        ([("fsdp", {**V1, "wrap_trainable_outmost": True})], {}, "InputError: wrap_trainable_outmost"),
        ([FSDP], {"find_unused_parameters": True}, "InputError: find_unused_parameters"),
        (
            [("fsdp", {**V1, "use_orig_params": False})],
            {"model": _frozen_but_attention(get_case("tied_llama").build())},
            "InputError: version 1 of fsdp cannot shard this model",
        ),
    ],
    ids=["flat groups", "adafactor", "nothing frozen", "unused", "flat frozen"],
)
def test_what_would_train_wrongly_is_refused(
    strategy: list[Any], arguments: dict[str, Any], said: str
) -> None:
    for message in run_ranks(_refused, 2, args=(strategy, arguments)):
        assert message.startswith(said)


@pytest.mark.parametrize("name", ["fsdp", "zero2"])
@pytest.mark.parametrize("other", [("half", "bf16"), ("compile", "eager")], ids=["half", "compile"])
def test_what_cannot_stand_with_it_is_said(name: str, other: Any) -> None:
    cluster = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")
    with pytest.raises(StrategyError, match="version 1"):
        resolve(Strategy([(name, V1), other]), cluster, load_registry())
    resolve(Strategy([name, other]), cluster, load_registry())
