"""zero1 and zero2 by DeepSpeed train as one process does."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.cluster import Cluster
from atorch_ns.errors import StepError, StrategyError
from atorch_ns.job import Result
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case, assert_parity, assert_ranks_agree, compare, snapshot
from atorch_ns.testing.workers import run_ranks
from opt_lib._deepspeed import zero as zero_module
from tests.job.test_optimizer_checks import Normalised
from tests.opt_lib.scenarios import (
    AUTOCAST,
    Runs,
    Scenario,
    accumulating_step,
    assert_equals_one_process,
    assert_norms,
    backward,
    bad_step,
    error_of,
    named,
    norms,
    plain_loop_step,
    run_scenarios,
    scheduled,
    selected,
    two_groups,
)

TWO = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")
PROBLEMS = zero_module.check("zero1", TWO)  # imports it, so that forked ranks need not
pytestmark = [
    pytest.mark.skipif(bool(PROBLEMS), reason="; ".join(map(str, PROBLEMS))),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STAGES: dict[int, tuple[str, dict[str, Any]]] = {
    1: ("zero1", {"use_ds_zero": True}),
    2: ("zero2", {"use_ds_zero": True}),
}


def _say_boundary(result: Result, last: bool) -> None:
    result.optim.set_gradient_accumulation_boundary(last)  # type: ignore[union-attr]


def _say_boundary_at_the_last_only(result: Result, last: bool) -> None:
    assert result.args["requires_set_gradient_accumulation_boundary"]
    if last:
        result.optim.set_gradient_accumulation_boundary(True)  # type: ignore[union-attr]


def _scenarios() -> dict[str, Scenario]:
    found = {}
    for stage, zero in STAGES.items():
        for case in ("mlp", "tied_llama", "hf_llama"):
            found[f"{case}-{stage}"] = Scenario(case, [zero])
        for name, more, arguments, reference in (
            ("clipped", [], {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}, {"max_norm": 0.05}),
            ("plain", [], {"step": plain_loop_step}, {}),
            ("accumulating", [], {"step": accumulating_step}, {}),
            ("boundaries", [], {"step": functools.partial(accumulating_step, before=_say_boundary)}, {}),
            (
                "last-boundary",
                [],
                {"step": functools.partial(accumulating_step, before=_say_boundary_at_the_last_only)},
                {},
            ),
            ("groups", ["checkpoint"], {"optim_param_func": two_groups}, {"optim_param_func": two_groups}),
            ("reentrant", [("checkpoint", {"no_reentrant": False})], {}, {}),
            ("compiled", [("compile", "aot_eager")], {}, {}),
            ("bf16", [("amp_native", "bf16")], {}, AUTOCAST),
        ):
            found[f"{name}-{stage}"] = Scenario("tied_llama", [zero, *more], arguments, reference)
    return found


SCENARIOS = _scenarios()
OFTEN = (
    *(f"{name}-1" for name in ("mlp", "clipped", "boundaries", "groups", "bf16")),
    *(f"{name}-2" for name in ("hf_llama", "accumulating", "last-boundary", "reentrant", "compiled")),
)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    return run_scenarios(selected(request, SCENARIOS), 2)


@pytest.mark.parametrize("name", named(SCENARIOS, often=OFTEN))
def test_equals_one_process(name: str, runs: Runs) -> None:
    assert_equals_one_process(SCENARIOS[name], name, runs)


def _accelerated(stage: int, **arguments: Any) -> Result:
    return accelerate_case(get_case("mlp"), [STAGES[stage]], **arguments)


def _norms() -> list[Any]:
    return [norms([zero]) for zero in STAGES.values()]


def test_the_norm_is_that_of_one_process_and_clipping_takes_effect() -> None:
    for rank in run_ranks(_norms, 2):
        for stage in rank:
            assert_norms(stage)


def _bad_steps() -> list[Any]:
    amp = [("amp_native", {"dtype": "bf16", "skip_if_nonfinite": skip}) for skip in (True, False)]
    return [bad_step([zero, method]) for zero in STAGES.values() for method in amp]


def test_a_bad_gradient_is_skipped_if_asked_and_only_then() -> None:
    taken, skipped = (False, False, False, False), (True, True, False, True)
    assert run_ranks(_bad_steps, 2) == [[skipped, taken] * 2] * 2


def _odd_orders() -> list[dict[str, Any]]:
    return [_odd_orders_of(stage) for stage in STAGES]


def _odd_orders_of(stage: int) -> dict[str, Any]:
    result, found = _accelerated(stage), {}
    optimizer: Any = result.optim
    before = snapshot(result.model)
    optimizer.step()  # without gradients, as any optimizer
    backward(result)
    optimizer.zero_grad()
    optimizer.step()
    found["moved without gradients"] = any(
        not torch.equal(value, before[name]) for name, value in snapshot(result.model).items()
    )
    optimizer.set_gradient_accumulation_boundary(False)
    backward(result)
    found["step"] = error_of(optimizer.step, StepError)
    optimizer.set_gradient_accumulation_boundary(True)
    result.clip_grad_norm_(1.0)
    found["backward"] = error_of(lambda: backward(result), StepError)
    found["add"] = error_of(lambda: optimizer.add_param_group({"params": []}), StepError)
    found["save"] = error_of(optimizer.state_dict, StepError)
    found["load"] = error_of(lambda: optimizer.load_state_dict({}), StepError)
    return found


def test_orders_that_lose_gradients_are_errors() -> None:
    for rank in run_ranks(_odd_orders, 2):
        for found in rank:
            assert not found["moved without gradients"]
            assert "set_gradient_accumulation_boundary" in found["step"]
            assert "clipped" in found["backward"]
            assert "partitioned" in found["add"]
            assert "atorch_ns.checkpoint" in found["save"]
            assert "atorch_ns.checkpoint" in found["load"]


def _scheduled_all() -> list[Any]:
    return [scheduled([zero]) for zero in STAGES.values()]


def test_a_scheduler_drives_it_and_a_dry_run_leaves_nothing() -> None:
    alone = scheduled([])
    for runs in zip(*run_ranks(_scheduled_all, 2), strict=True):
        assert_ranks_agree(list(runs))
        assert_parity(compare(alone, runs[0]))


def _refused(optim_func: Any, optim_args: dict[str, Any]) -> str:
    return error_of(lambda: _accelerated(2, optim_func=optim_func, optim_args=optim_args))


@pytest.mark.parametrize(
    ("optim_func", "said"),
    [
        (torch.optim.Adafactor, "BackendError: DeepSpeed updates flat pieces"),
        (torch.optim.Adagrad, "BackendError: Adagrad keeps state"),
        (Normalised, "BackendError: Normalised updates each parameter by what it sees of the others"),
    ],
)
def test_optimizers_that_it_would_drive_wrongly_are_refused(optim_func: Any, said: str) -> None:
    for message in run_ranks(_refused, 2, args=(optim_func, {"lr": 1e-2})):
        assert message.startswith(said)


class _Odd(nn.Module):
    """The case's model with a parameter that nothing uses."""

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.extra = nn.Parameter(extra)
        self.inner = get_case("mlp").build()

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.inner(features, targets)


def _odd_parameters() -> list[str]:
    unused = _accelerated(1, model=_Odd(torch.ones(3)))
    backward(unused)
    return [
        error_of(unused.optim.step),  # type: ignore[union-attr]
        error_of(lambda: _accelerated(2, model=_Odd(torch.ones(())))),
        error_of(lambda: _accelerated(2, model=_Odd(torch.ones(3, dtype=torch.bfloat16)))),
        error_of(lambda: auto_accelerate(nn.Linear(2, 2), load_strategy=[STAGES[1]])),
    ]


def test_parameters_that_it_would_not_train_as_one_process_are_refused() -> None:
    for unused, single, reduced, alone in run_ranks(_odd_parameters, 2):
        assert unused.startswith("StepError: 1 trainable parameter(s) took no part in the loss: extra.")
        assert "extra has shape ()" in single
        assert "dtype torch.bfloat16" in reduced
        assert "optim_func" in alone


def _surroundings() -> tuple[bool, Any, Any, str]:
    result = _accelerated(1)
    ops: Any = sys.modules["deepspeed.ops"]
    return (
        "DS_ACCELERATOR" in os.environ,
        vars(ops).get("__compatible_ops__"),
        dict(result.args),
        str(result.report),
    )


def test_nothing_is_left_behind_and_the_result_says_how_to_drive_it() -> None:
    for environment, operators, args, report in run_ranks(_surroundings, 2):
        assert not environment
        assert operators is None
        assert args == {"use_optim_backward": True, "requires_set_gradient_accumulation_boundary": True}
        assert "DeepSpeed ZeRO stage 1" in report


REGISTRY = load_registry()
MESH = ("parallel_mode", ([("zero", 2), ("data", 2)], None))
FOUR = Cluster(world_size=4, local_world_size=4, distributed=True, torch="2.13.0")


@pytest.mark.parametrize("zero", STAGES.values(), ids=["zero1", "zero2"])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("half", "bf16"), "fp32 copies"),
        (("amp_native", "fp16"), "Use bf16"),
        (MESH, "one axis"),
        ("ddp", "gradient_sync"),
    ],
    ids=["half", "fp16", "mesh", "ddp"],
)
def test_what_cannot_stand_with_it_is_said(zero: Any, other: Any, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        resolve(Strategy([zero, other]), FOUR, REGISTRY)


def test_native_backends_do_stand_with_them() -> None:
    for name in ("zero1", "zero2"):
        for other in (("half", "bf16"), ("amp_native", "fp16"), MESH):
            resolve(Strategy([name, other]), FOUR, REGISTRY)


def test_a_missing_package_is_one_problem_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(StrategyError) as caught:
        resolve(Strategy([STAGES[1], ("compile", "no_such_backend")]), TWO, REGISTRY)
    assert len(caught.value.problems) == 2
    assert zero_module.INSTALL in str(caught.value)
    assert "no such backend" in str(caught.value)
    resolve(Strategy(["zero1"]), TWO, REGISTRY)
