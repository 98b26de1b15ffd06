"""zero1 and zero2 by fairscale train as one process does."""

from __future__ import annotations

import functools
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StepError, StrategyError
from atorch_ns.job import Result
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import (
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
)
from atorch_ns.testing.workers import run_ranks
from opt_lib import _fairscale as fairscale
from tests.opt_lib.scenarios import (
    AUTOCAST,
    AUTOCAST_FP16,
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
from tests.warm import COLD_PYTHON

TWO = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")
FOUR = Cluster(world_size=4, local_world_size=4, distributed=True, torch="2.13.0")
PROBLEMS = fairscale.check("zero1", TWO)  # imports it, so that forked ranks need not
pytestmark = [
    pytest.mark.skipif(bool(PROBLEMS), reason="; ".join(map(str, PROBLEMS))),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

OSS: tuple[str, dict[str, Any]] = ("zero1", {"backend": "fairscale"})
SDP: tuple[str, dict[str, Any]] = ("zero2", {"not_use_fsdp": True})
MESH = ("parallel_mode", ([("zero", 2), ("data", 2)], None))
FP16 = ("amp_native", {"dtype": "fp16", "init_scale": 256.0})


def _eval_and_back(result: Result, last: bool) -> None:
    result.model.eval()
    with torch.no_grad():
        result.model(get_case("tied_llama").make_batch(2, 9))
    result.model.train()


def _scenarios() -> dict[str, Scenario]:
    found = {}
    for label, zero in (("1", OSS), ("2", SDP)):
        for case in ("mlp", "tied_llama", "hf_llama"):
            found[f"{case}-{label}"] = Scenario(case, [zero])
        for name, more, arguments, reference in (
            ("clipped", [], {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}, {"max_norm": 0.05}),
            ("plain", [], {"step": plain_loop_step}, {}),
            ("accumulating", [], {"step": accumulating_step}, {}),
            ("evaluated", [], {"step": functools.partial(accumulating_step, before=_eval_and_back)}, {}),
            ("groups", ["checkpoint"], {"optim_param_func": two_groups}, {"optim_param_func": two_groups}),
            ("reentrant", [("checkpoint", {"no_reentrant": False})], {}, {}),
            ("replaced", ["module_replace"], {}, {}),
            ("compiled", [("compile", "aot_eager")], {}, {}),
            ("bf16", [("amp_native", "bf16")], {}, AUTOCAST),
            ("fp16", [FP16], {}, AUTOCAST_FP16),
        ):
            found[f"{name}-{label}"] = Scenario("tied_llama", [zero, *more], arguments, reference)
    return found


ON_TWO = _scenarios()
OFTEN = (
    "mlp-1",
    "hf_llama-2",
    "clipped-1",
    "accumulating-2",
    "evaluated-1",
    "groups-2",
    "replaced-1",
    "fp16-2",
)
ON_FOUR = {"hybrid-1": Scenario("tied_llama", [OSS, MESH]), "four-2": Scenario("hf_llama", [SDP])}


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest) -> Runs:
    return run_scenarios(selected(request, ON_TWO), 2)


@pytest.fixture(scope="module")
def on_four() -> Runs:
    return run_scenarios(ON_FOUR, 4)


@pytest.mark.parametrize("name", named(ON_TWO, often=OFTEN))
def test_two_ranks_equal_one(name: str, on_two: Runs) -> None:
    assert_equals_one_process(ON_TWO[name], name, on_two)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one(name: str, on_four: Runs) -> None:
    assert_equals_one_process(ON_FOUR[name], name, on_four)


def _half(strategies: list[list[Any]]) -> list[Any]:
    return [accelerated_run(get_case("mlp"), strategy) for strategy in strategies]


def test_half_precision_is_that_of_plain_replication() -> None:
    """fp16 with masters under OSS, bf16 without under both."""
    strategies = [
        [other, ("half", dtype)] for dtype in ("fp16", "bf16") for other in ("ddp", OSS, SDP) if (dtype, other) != ("fp16", SDP)
    ]  # fmt: skip
    runs = run_ranks(_half, 2, args=(strategies,))
    for ranks in zip(*runs, strict=True):
        assert_ranks_agree(list(ranks))
    fp16, fp16_oss, bf16, bf16_oss, bf16_sdp = runs[0]
    assert_parity(compare(fp16, fp16_oss), param_tol=1e-6)
    assert_parity(compare(bf16, bf16_oss), param_tol=1e-6)
    assert_parity(compare(bf16, bf16_sdp), param_tol=0.1, loss_tol=1e-2)


def test_the_norm_is_that_of_one_process_and_clipping_takes_effect() -> None:
    for rank in run_ranks(norms, 2, args=([SDP],)):
        assert_norms(rank)


def _bad_steps() -> list[Any]:
    skipping = ("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True})
    return [bad_step([zero, amp]) for zero in (OSS, SDP) for amp in (FP16, skipping)]


def test_all_ranks_skip_a_step_that_one_cannot_take() -> None:
    assert run_ranks(_bad_steps, 2) == [[(True, True, False, True)] * 4] * 2


def _unreduced() -> list[str]:
    found = []
    result = accelerate_case(get_case("mlp"), [SDP])
    assert result.optim is not None
    result.model.eval()
    backward(result)
    found.append(error_of(result.optim.step, StepError))
    result.optim.zero_grad()
    result.model.train()
    with result.job.gradients.skip_sync():
        backward(result)
    found.append(error_of(result.optim.step, StepError))
    backward(result)
    result.optim.step()
    return found


def test_a_step_on_gradients_of_one_rank_is_an_error() -> None:
    for messages in run_ranks(_unreduced, 2):
        assert all("did not average" in message for message in messages)


def _scheduled_all() -> list[Any]:
    return [scheduled([zero]) for zero in (OSS, SDP)]


def test_a_scheduler_drives_it_and_a_dry_run_leaves_nothing() -> None:
    alone = scheduled([])
    for runs in zip(*run_ranks(_scheduled_all, 2), strict=True):
        assert_ranks_agree(list(runs))
        assert_parity(compare(alone, runs[0]))


def _tiny() -> str:
    class One(nn.Linear):
        """A model of one parameter, for two ranks."""

    case = get_case("mlp")
    return error_of(lambda: accelerate_case(case, [SDP, "amp_native"], model=One(16, 8, bias=False)))


def test_loss_scaling_needs_a_parameter_on_every_rank() -> None:
    for message in run_ranks(_tiny, 2):
        assert message.startswith("BackendError: ShardedDataParallel leaves data ranks [1] of 2")


@pytest.mark.parametrize(
    ("other", "said"), [(("half", "fp16"), "fp32 copies"), (MESH, "one axis"), ("ddp", "gradient_sync")]
)
def test_what_cannot_stand_with_it_is_said(other: Any, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        resolve(Strategy([SDP, other]), FOUR, load_registry())


@pytest.mark.parametrize("zero", [OSS, SDP], ids=["zero1", "zero2"])
def test_a_missing_or_broken_package_is_one_problem_among_all(
    zero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"{name} was built for another machine")

    monkeypatch.setattr(
        "opt_lib._config_checks.importlib", SimpleNamespace(import_module=fail)
    )  # nobody else's
    with pytest.raises(StrategyError) as caught:
        resolve(Strategy([zero, ("compile", "no_such_backend")]), TWO, load_registry())
    assert len(caught.value.problems) == 2
    assert fairscale.INSTALL in str(caught.value)
    assert "another machine" in str(caught.value)


def test_backends_are_imported_only_when_used() -> None:
    code = (
        "import sys, opt_lib.zero1, opt_lib.zero2, opt_lib.fsdp\n"
        "sys.exit(any(name.split('.')[0] in ('deepspeed', 'fairscale') for name in sys.modules))"
    )
    subprocess.run([COLD_PYTHON, "-c", code], check=True, timeout=60)
