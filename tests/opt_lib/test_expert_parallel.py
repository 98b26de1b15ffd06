"""expert_parallel trains mixture-of-experts models as one process does."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.errors import InputError, StepError
from atorch_ns.testing.conformance import MethodConformance
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import (
    BF16_GLOBAL_BATCH,
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import catch_ranks, run_ranks
from opt_lib.expert_parallel import ExpertParallel
from tests.opt_lib.scenarios import named, selected
from tests.parity.variants import reference

EXPERT_2 = ("parallel_mode", [("expert", 2)])
MAX_NORM = 0.05


def _qwen(balance: float = 0.0) -> nn.Module:
    """Six experts and one that all tokens share; the loss is the model's own."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        output_router_logits=balance > 0,
        router_aux_loss_coef=balance,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        return Qwen2MoeForCausalLM(config).train()


def _labelled(size: int, seed: int) -> dict[str, torch.Tensor]:
    batch = get_case("hf_mixtral").make_batch(size, seed)
    return {**batch, "labels": batch["input_ids"]}


def _own_loss(batch: Any, output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


MIXTRAL = get_case("hf_mixtral")
QWEN = dataclasses.replace(MIXTRAL, name="qwen", build=_qwen, make_batch=_labelled, loss_func=_own_loss)
BALANCED = dataclasses.replace(QWEN, name="balanced", build=lambda: _qwen(0.5))
CASES = {case.name: case for case in (MIXTRAL, QWEN, BALANCED)}

Run = tuple[str, list[Any], dict[str, Any]]

ON_2: dict[str, Run] = {
    "alone": ("hf_mixtral", [EXPERT_2], {}),
    "clipped": ("hf_mixtral", [EXPERT_2], {"max_grad_norm": MAX_NORM}),
    "clipped fsdp": ("hf_mixtral", [EXPERT_2, "fsdp"], {"max_grad_norm": MAX_NORM}),
    "fsdp": ("hf_mixtral", [EXPERT_2, "fsdp"], {}),
    "fsdp in host memory": ("hf_mixtral", [EXPERT_2, ("fsdp", {"cpu_offload": True})], {}),
    "zero2": ("hf_mixtral", [EXPERT_2, "zero2"], {}),
    "checkpoint": ("hf_mixtral", [EXPERT_2, "checkpoint"], {}),
    "checkpoint, reentrant": ("hf_mixtral", [EXPERT_2, ("checkpoint", {"no_reentrant": False})], {}),
    "checkpoint and fsdp": ("hf_mixtral", [EXPERT_2, "checkpoint", "fsdp"], {}),
    "accumulation and fsdp": ("hf_mixtral", [EXPERT_2, ("gradient_accumulation", 2), "fsdp"], {}),
    "by name": ("hf_mixtral", [EXPERT_2, ("expert_parallel", {"experts": ["MixtralExperts"]})], {}),
    "qwen": ("qwen", [EXPERT_2], {}),
    "qwen with fsdp": ("qwen", [EXPERT_2, "fsdp"], {}),
    "balanced": ("balanced", [EXPERT_2], {}),
    "balanced with fsdp": ("balanced", [EXPERT_2, "checkpoint", "fsdp"], {}),
}
ON_4: dict[str, Run] = {
    "data": ("hf_mixtral", [("parallel_mode", [("expert", 2), ("data", 2)])], {}),
    "data, clipped": (
        "hf_mixtral",
        [("parallel_mode", [("expert", 2), ("data", 2)])],
        {"max_grad_norm": MAX_NORM},
    ),
    "data and fsdp": ("hf_mixtral", [("parallel_mode", [("data", 2), ("expert", 2)]), "fsdp"], {}),
    "data, fsdp, clipped": (
        "hf_mixtral",
        [("parallel_mode", [("expert", 2), ("data", 2)]), "fsdp"],
        {"max_grad_norm": MAX_NORM},
    ),
    "zero and fsdp": ("qwen", [("parallel_mode", [("expert", 2), ("zero", 2)]), "checkpoint", "fsdp"], {}),
    "zero2": ("hf_mixtral", [("parallel_mode", [("zero", 2), ("expert", 2)]), "zero2"], {}),
    "expert 4": ("hf_mixtral", [("parallel_mode", [("expert", 4)])], {}),
    "balanced": ("balanced", [("parallel_mode", [("expert", 2), ("data", 2)])], {}),
    "accumulation": (
        "hf_mixtral",
        [("parallel_mode", [("expert", 2), ("data", 2)]), ("gradient_accumulation", 2), "fsdp"],
        {},
    ),
    "tensor": ("hf_mixtral", [("parallel_mode", [("expert", 2), ("tensor", 2)]), "fsdp"], {}),
}


OFTEN = (
    "alone",
    "clipped fsdp",
    "zero2",
    "checkpoint and fsdp",
    "by name",
    "qwen",
    "balanced",
    "data, fsdp, clipped",
    "tensor",
)


def _attempt(run: Run) -> Trajectory | str:
    name, strategy, arguments = run
    try:
        return accelerated_run(CASES[name], strategy, **arguments)
    except Exception:
        return traceback.format_exc()


def _run_all(runs: dict[str, Run], num_ranks: int) -> dict[str, list[Trajectory | str]]:
    for case in CASES.values():
        case.build()  # imports what ranks would import
    by_rank = run_ranks(lambda: {name: _attempt(run) for name, run in runs.items()}, num_ranks, timeout_s=110)
    return {name: [rank[name] for rank in by_rank] for name in runs}


@pytest.fixture(scope="module")
def on_2(request: pytest.FixtureRequest) -> dict[str, list[Trajectory | str]]:
    return _run_all(selected(request, ON_2), 2)


@pytest.fixture(scope="module")
def on_4(request: pytest.FixtureRequest) -> dict[str, list[Trajectory | str]]:
    return _run_all(selected(request, ON_4), 4)


def _assert_parity(run: Run, found: list[Trajectory | str]) -> None:
    trajectories = []
    for trajectory in found:
        assert not isinstance(trajectory, str), trajectory
        trajectories.append(trajectory)
    assert_ranks_agree(trajectories)
    name, _, arguments = run
    assert_parity(
        compare(reference_run(CASES[name], max_norm=arguments.get("max_grad_norm")), trajectories[0])
    )


@pytest.mark.parametrize("name", named(ON_2, often=OFTEN))
def test_two_ranks(name: str, on_2: dict[str, list[Trajectory | str]]) -> None:
    _assert_parity(ON_2[name], on_2[name])


@pytest.mark.parametrize("name", named(ON_4, often=OFTEN))
def test_four_ranks(name: str, on_4: dict[str, list[Trajectory | str]]) -> None:
    _assert_parity(ON_4[name], on_4[name])


def _in_bf16() -> dict[str, Trajectory]:
    strategies = {
        "ddp amp": ["ddp", ("amp_native", "bf16")],
        "ddp half": ["ddp", ("half", "bf16")],
        "fsdp amp": ["fsdp", ("amp_native", "bf16")],
        "fsdp half": ["fsdp", ("half", "bf16")],
        "amp": [EXPERT_2, ("amp_native", "bf16")],
        "amp fsdp": [EXPERT_2, ("amp_native", "bf16"), "checkpoint", "fsdp"],
        "half": [EXPERT_2, ("half", "bf16")],
        "half fsdp": [EXPERT_2, ("half", "bf16"), "fsdp"],
    }
    return {
        name: accelerated_run(MIXTRAL, strategy, global_batch=BF16_GLOBAL_BATCH)
        for name, strategy in strategies.items()
    }


def test_bf16_is_as_near_as_replication_is() -> None:
    """Plain replication in bf16 rounds apart from one process as well; experts on other ranks add nothing to that."""
    alone = {kind: reference(MIXTRAL.name, f"{kind} bfloat16") for kind in ("amp", "half")}
    runs = run_ranks(_in_bf16, 2, timeout_s=110)[0]
    counterparts = {"amp": "ddp amp", "amp fsdp": "fsdp amp", "half": "ddp half", "half fsdp": "fsdp half"}
    for name, other in counterparts.items():
        report = compare(runs[other], runs[name])
        kind = name.split()[0]
        rounding = [compare(alone[kind], runs[f"{how} {kind}"]) for how in ("ddp", "fsdp")]
        # Each of two runs may be that far from one process, in opposite directions; how far exactly is chance.
        loss_bound = 3 * max(one.max_loss_error for one in rounding)
        assert report.max_loss_error <= loss_bound, (name, loss_bound, report.describe())
        # A lost gradient would be an error of 1.
        param_bound = min(0.75, 3 * max(one.max_param_error for one in rounding))
        assert report.max_param_error <= param_bound, (name, param_bound, report.describe())


class TestConformance(MethodConformance):
    method = ExpertParallel
    configs = (None, ("MixtralExperts",), {"balance": "rank"})
    bad_configs = (("NoSuchExperts",), "experts"), ({"balance": "none"}, "balance"), ({"degree": 2}, "degree")
    cases = ("hf_mixtral",)


def _sizes() -> dict[str, Any]:
    held: dict[str, Any] = {}
    for label, strategy in {"ddp": [EXPERT_2], "fsdp": [EXPERT_2, "fsdp"]}.items():
        result = accelerate_case(QWEN, strategy)
        for batch in result.dataloader or ():
            result.train_step(batch)
            break
        assert result.optim is not None
        for name, parameter in result.model.named_parameters():
            if ".experts." in name:
                assert isinstance(parameter, DTensor)
                assert isinstance(parameter.grad, DTensor)
                state = result.optim.state[parameter]["exp_avg"]
                held[f"{label} {name}"] = (
                    parameter.to_local().untyped_storage().nbytes(),
                    parameter.grad.to_local().numel() * 4,
                    state.to_local().numel() * 4,
                    parameter.numel() * 4,
                )
    return held


def test_each_rank_holds_its_share() -> None:
    _qwen()
    for held in run_ranks(_sizes, 2):
        assert held
        for name, (*sizes, whole) in held.items():
            assert sizes == [whole // 2] * 3, name


def _from_meta() -> tuple[Trajectory, Trajectory]:
    return (
        accelerated_run(QWEN, [EXPERT_2, "fsdp"], model=_on_meta()),
        accelerated_run(QWEN, [("parallel_mode", [("data", 2)]), "fsdp"], model=_on_meta()),
    )


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _qwen()


def test_a_model_on_meta_begins_as_the_whole_one() -> None:
    _qwen()
    for divided, whole in run_ranks(_from_meta, 2):
        assert compare(whole, divided).initial_error == 0.0
        assert_parity(compare(whole, divided))


def _difference_of_balance() -> dict[str, Trajectory]:
    return {
        balance: accelerated_run(BALANCED, [EXPERT_2, ("expert_parallel", {"balance": balance})])
        for balance in ("global", "rank")
    }


def test_balance_over_ranks_or_over_each() -> None:
    runs = run_ranks(_difference_of_balance, 2)[0]
    reference = reference_run(BALANCED)
    assert_parity(compare(reference, runs["global"]))
    alone = compare(reference, runs["rank"])
    assert alone.max_param_error > 1e-3
    assert alone.max_loss_error > 1e-4


class _OtherBalance(nn.Module):
    """Its auxiliary loss is none that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _qwen(0.5)
        self.config = self.inner.config

    def forward(self, **batch: Any) -> Any:
        output = self.inner(**batch)
        return type(output)(**{**output, "aux_loss": output.aux_loss.square()})


def _unknown_balance(balance: str) -> tuple[list[str], list[float]]:
    case = dataclasses.replace(BALANCED, build=lambda: _OtherBalance().train())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = accelerated_run(case, [EXPERT_2, ("expert_parallel", {"balance": balance})], steps=2)
    return [str(warning.message) for warning in caught], run.losses


def test_an_unknown_balance_is_said() -> None:
    (told, losses), _ = run_ranks(_unknown_balance, 2, args=("auto",))
    assert sum("each rank balances its own tokens" in text for text in told) == 1
    assert len(losses) == 2
    for outcome in catch_ranks(_unknown_balance, 2, args=("global",)):
        assert isinstance(outcome.error, StepError), outcome.describe()


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> Any:
        return sum(expert(features) for expert in self.experts)


REFUSED: dict[str, tuple[Case, list[Any], type[Exception], str]] = {
    "does not divide": (
        QWEN,
        [("parallel_mode", [("expert", 4)])],
        InputError,
        "Use one of 2, 3, 6 for expert",
    ),
    "dense": (get_case("mlp"), [("parallel_mode", [("expert", 4)])], InputError, "No module takes tokens"),
    "a list": (
        dataclasses.replace(get_case("mlp"), build=_Listed),
        [("parallel_mode", [("expert", 4)])],
        InputError,
        "the experts of experts (4 Linear) cannot be divided: calling it with a few tokens fails",
    ),
    "ignored": (
        QWEN,
        [
            ("parallel_mode", [("expert", 2), ("data", 2)]),
            ("fsdp", {"atorch_ignored_cls": ["Qwen2MoeExperts"]}),
        ],
        InputError,
        "cannot be left out of sharding",
    ),
}


def _refused() -> dict[str, tuple[str, str]]:
    told = {}
    for name, (case, strategy, _, _) in REFUSED.items():
        try:
            accelerate_case(case, strategy)
            told[name] = ("", "")
        except Exception as error:
            told[name] = (type(error).__name__, str(error))
    return told


def test_refused_on_every_rank() -> None:
    _qwen()
    for told in run_ranks(_refused, 4):
        for name, (_, _, kind, text) in REFUSED.items():
            assert told[name][0] == kind.__name__, (name, told[name])
            assert text in told[name][1], (name, told[name])
