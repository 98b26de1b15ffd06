"""The method module_replace: which replacements are used, and what the report says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing import assert_parity, assert_ranks_agree, compare, get_case, reference_run, run_ranks
from atorch_ns.testing.networks import ResidualBlock
from atorch_ns.testing.parity import accelerate_case, accelerated_run
from opt_lib._replacements.registry import known_replacements
from opt_lib.module_replace import ModuleReplace, ModuleReplaceConfig
from tests.opt_lib.replacements.modules import (
    Child,
    FastBuilt,
    FastLinear,
    FastSubclass,
    Model,
    Old,
    apply,
    job_of,
)


@pytest.mark.parametrize(
    ("plan", "used"),
    [
        ({}, False),
        ({"precision": {"parameter_dtype": "bfloat16"}}, True),
        ({"precision": {"compute_dtype": "bfloat16"}}, True),
        ({"precision": {"compute_dtype": "float16"}}, False),
        ({"precision": {"parameter_dtype": "bfloat16", "compute_dtype": "float16"}}, False),
    ],
)
def test_a_pair_is_used_for_the_dtypes_it_supports(
    register: Callable[..., Any], plan: dict[str, Any], used: bool
) -> None:
    register("fast", supported_dtypes={torch.bfloat16}, pair_cls=(Old, FastBuilt))
    model = Model()
    _, explained, _ = apply(model, **plan)
    assert (type(model.first) is FastBuilt) is used
    if not used:
        dtype = plan["precision"]["compute_dtype"] if plan else "float32"
        assert explained[0] == (f"fast is not used: it supports bfloat16, and this job computes in {dtype}")


def test_a_model_that_comes_in_another_dtype_computes_in_it(register: Callable[..., Any]) -> None:
    register("fast", supported_dtypes={torch.bfloat16}, pair_cls=(Old, FastBuilt))
    model = Model().to(torch.bfloat16)
    apply(model)
    assert type(model.first) is FastBuilt


def test_a_later_replacement_takes_what_an_earlier_one_cannot(register: Callable[..., Any]) -> None:
    register("preferred", supported_dtypes={torch.float16}, pair_cls=(Old, FastSubclass))
    register("fallback", pair_cls=(Old, FastBuilt))
    model = Model()
    _, explained, warned = apply(model)
    assert type(model.first) is FastBuilt
    assert explained[0].startswith("preferred is not used")
    assert explained[1].startswith("fallback: 4 × Old")
    assert not warned
    model = Model()
    apply(model, precision={"parameter_dtype": "float16"})
    assert type(model.first) is FastSubclass


class HandNorm(nn.Module):
    """An RMSNorm that somebody wrote."""

    def __init__(self, size: int = 4, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OwnFastNorm(HandNorm):
    """What the user wants instead."""


class OtherFastNorm(HandNorm):
    """What another pair makes of that."""


def test_what_a_pair_made_is_not_replaced_again(register: Callable[..., Any]) -> None:
    register("mine", pair_cls=(HandNorm, OwnFastNorm))
    register("chained", pair_cls=(OwnFastNorm, OtherFastNorm))
    model = nn.Sequential(HandNorm(), nn.Sequential(HandNorm()))
    _, explained, _ = apply(model)
    assert (type(model[0]), type(model[1][0])) == (OwnFastNorm, OwnFastNorm)
    assert "mine: 2 × HandNorm → OwnFastNorm" in explained
    assert not any("fused_rms_norm" in text for text in explained)


def test_the_profiled_model_spares_them_too(register: Callable[..., Any]) -> None:
    register("mine", pair_cls=(HandNorm, OwnFastNorm))
    model = nn.Sequential(HandNorm())
    method = ModuleReplace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleReplace, "options", lambda *args: iter([ModuleReplaceConfig()]))
        rewritten = method.rewritten(model, None, Cluster())  # type: ignore[arg-type]  # no profile is read
    assert rewritten is not None
    assert type(rewritten[0]) is OwnFastNorm


def test_include_and_exclude(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastBuilt))
    register("other", pair_cls=(Child, FastBuilt))
    for config, replaced in (
        (("fast",), (True, False)),
        ("other", (False, True)),
        ({"exclude": ["fast"]}, (False, True)),
        ({"include": ["fast", "other"]}, (True, True)),
    ):
        model = Model()
        apply(model, config)
        assert (type(model.first) is FastBuilt, type(model.second) is FastBuilt) == replaced


def test_nothing_replaced_is_said_once_and_why() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    _, explained, (warning,) = apply(model)
    assert explained == [
        "fused_layer_norm: 1 × LayerNorm: torch's fused kernel already",
        "nothing was replaced",
    ]
    assert "module_replace replaced nothing" in warning
    assert "no transformers models" in warning
    assert "no hand-written RMSNorms" in warning
    assert "fused kernel already" in warning
    _, _, (warning,) = apply(model, {"exclude": list(known_replacements())})
    assert "every replacement is excluded" in warning


def test_a_replacement_asked_for_by_name_that_does_nothing_is_a_warning(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastBuilt))
    register("half", supported_dtypes={"fp16"}, pair_cls=(Old, FastBuilt))
    _, _, (warning,) = apply(Model(), ("fast", "half"))
    assert "half is not used: it supports float16" in warning
    assert "fast:" not in warning


def test_only_rank_0_warns() -> None:
    job = job_of(nn.Linear(2, 2))
    job.cluster = Cluster(world_size=2, rank=1, distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModuleReplace().apply(job, ModuleReplaceConfig())
    assert job.explained("module_replace") == ["nothing was replaced"]


@pytest.mark.parametrize(
    ("config", "key", "part"),
    [
        (("fused_rmsnorm",), "include", "Did you mean 'fused_rms_norm'?"),
        ({"exclude": "zzz"}, "exclude", "register_replace_pair before auto_accelerate"),
        ({"include": ["a"], "exclude": ["a"]}, None, "a is in both"),
        ({"incldue": []}, "incldue", "Did you mean 'include'?"),
        (3, "include", "tuple"),
    ],
)
def test_wrong_configs_are_problems(config: Any, key: str | None, part: str) -> None:
    with pytest.raises(StrategyError) as caught:
        resolve(Strategy([("module_replace", config)]), Cluster(), load_registry())
    problem = caught.value.problems[0]
    assert (problem.method, problem.key) == ("module_replace", key)
    assert part in str(problem)


def test_the_plan_says_so() -> None:
    assert ModuleReplace().plan(Plan(), ModuleReplaceConfig()).replaced


def test_the_report_shows_what_was_replaced(register: Callable[..., Any]) -> None:
    register("fast_linear", pair_cls=(nn.Linear, FastLinear))
    case = get_case("mlp")
    result = accelerate_case(case, ["module_replace"])
    (row,) = result.report.rows
    assert "fast_linear: 10 × Linear → FastLinear" in row.why
    assert "5 × LayerNorm: torch's fused kernel already" in row.why
    report = compare(reference_run(case), accelerated_run(case, ["module_replace"]))
    assert_parity(report)


class FastBlock(nn.Module):
    """A residual block that derives from nothing of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = FastLinear(32, 64)
        self.down = FastLinear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_later_methods_select_by_the_original_classes(register: Callable[..., Any]) -> None:
    register("fast_block", pair_cls=(ResidualBlock, FastBlock))
    case = get_case("mlp")
    reference = reference_run(case)
    strategy = [
        "module_replace",
        ("checkpoint", "ResidualBlock"),
        ("fsdp", {"atorch_wrap_cls": (ResidualBlock,)}),
    ]

    def train() -> tuple[str, Any]:
        return str(accelerate_case(case, strategy).report), accelerated_run(case, strategy)

    told, run = run_ranks(train, 2)[0]
    assert "4 × ResidualBlock → FastBlock" in told
    assert "4 module(s) recomputed" in told
    assert "4 unit(s)" in told
    assert_parity(compare(reference, run))


@pytest.mark.parametrize("case_name", ["hf_llama", "mlp"])
def test_two_ranks_with_fsdp_match_one_process(register: Callable[..., Any], case_name: str) -> None:
    register("fast_linear", pair_cls=(nn.Linear, FastLinear))
    case = get_case(case_name)
    reference = reference_run(case)
    strategy = ["module_replace", "fsdp", "checkpoint"]
    runs = run_ranks(lambda: accelerated_run(case, strategy), 2)
    assert_parity(compare(reference, runs[0]))
    assert_ranks_agree(runs)
