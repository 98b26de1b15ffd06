"""operator_parallel trains what one process trains, whatever plan divides it, alone and with what composes on top."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from atorch_ns import auto_accelerate
from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.engine.trial.run import run_trial
from atorch_ns.errors import InputError, StrategyError
from atorch_ns.method import load_registry
from atorch_ns.operators import OperatorPlan
from atorch_ns.testing.models import CASES
from atorch_ns.testing.parity import accelerate_case, accelerated_run, compare, reference_run
from atorch_ns.testing.workers import run_ranks
from tests.engine.inputs import case_inputs
from tests.engine.trials import task
from tests.opt_lib.scenarios import named
from tests.opt_lib.tensor_cases import check

MESH = ("parallel_mode", [("tensor", 2)])
BOTH = ("parallel_mode", [("tensor", 2), ("data", 2)])
BATCH = ("operator_parallel", {"policy": "batch"})


def anything(seed: int) -> tuple[str, dict[str, Any]]:
    return ("operator_parallel", {"policy": "random", "seed": seed})


@pytest.mark.parametrize(
    "name",
    named(("mlp", "tied_llama", "hf_gpt2", "hf_bert", "hf_mixtral"), often=("mlp", "hf_gpt2", "hf_mixtral")),
)
def test_two_ranks(name: str) -> None:
    small = {"memory_gib": 0.0015} if name != "mlp" else {}
    strategies = {
        "found": [MESH, ("operator_parallel", small)],
        "the batch": [MESH, BATCH],
        "at random, with checkpoint": [MESH, anything(2), "checkpoint"],
    }
    check(CASES[name], 2, strategies)


def test_four_ranks() -> None:
    strategies = {
        "with ddp": [BOTH, anything(3)],
        "with fsdp": [BOTH, anything(4), "fsdp", "checkpoint"],
        "tensor 4": [("parallel_mode", [("tensor", 4)]), anything(5)],
    }
    check(CASES["hf_llama"], 4, strategies)


def test_micro_batches_and_clipping() -> None:
    check(
        CASES["hf_llama"],
        2,
        {"accumulated": [MESH, anything(6)]},
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
    )


def test_bf16() -> None:
    reference = reference_run(CASES["hf_llama"], autocast_dtype=torch.bfloat16)
    strategy = [MESH, anything(7), ("amp_native", "bf16")]
    (run, _) = run_ranks(accelerated_run, 2, args=(CASES["hf_llama"], strategy))
    assert compare(run, reference).max_loss_error < 2e-2


def _dividing_nothing() -> list[str]:
    plan = {"degree": 2, "operators": {}, "parameters": {}, "schema": 1}
    found = []
    for settings in ({"plan": plan}, {"policy": "batch"}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerate_case(CASES["mlp"], [MESH, ("operator_parallel", settings)])
        found.append(" ".join(str(one.message) for one in caught))
    return found


def test_a_plan_that_divides_nothing_is_warned_of() -> None:
    (nothing, batch), _ = run_ranks(_dividing_nothing, 2)  # the first rank warns
    assert "nothing is divided, so each of the 2 tensor ranks computes all of its samples" in nothing
    assert "nothing is divided" not in batch


def _trial_of(settings: dict[str, Any]) -> RankReport:
    return run_trial(
        case_inputs("mlp"), Cluster.detect(), task(1, MESH, ("operator_parallel", settings)), load_registry()
    ).report


def test_no_search_chooses_a_plan_that_divides_nothing() -> None:
    """Every rank would compute everything, and without communication that may well be the fastest."""
    plan = {"degree": 2, "operators": {}, "parameters": {}, "schema": 1}
    for report in run_ranks(_trial_of, 2, args=({"plan": plan},)):
        assert (report.status, report.refused_by) == ("refused", "operator_parallel")
        assert "the axis tensor divides nothing of this model" in report.reason
    for report in run_ranks(_trial_of, 2, args=({"policy": "batch"},)):
        assert report.status == "ok", report.reason


class _TakesGradients(nn.Module):
    """A model whose forward pass differentiates it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out: torch.Tensor = self.layers(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope


def _refused() -> str:
    data = TensorDataset(torch.randn(8, 8))
    try:
        auto_accelerate(
            _TakesGradients(),
            torch.optim.SGD,
            data,
            lambda batch, out: out.square().mean(),
            optim_args={"lr": 0.1},
            dataloader_args={"batch_size": 4},
            model_input_format="unpack_sequence",
            load_strategy=[MESH, "operator_parallel"],
        )
    except InputError as error:
        return str(error)
    return ""


def test_a_model_that_differentiates_itself_is_refused() -> None:
    for told in run_ranks(_refused, 2):
        assert "the divided model fails, but the whole one runs: RuntimeError: Trying to backward" in told
        assert "leave operator_parallel out" in told


class _Box:
    """A result that is not a container which torch knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class _GivesABox(torch.nn.Module):
    """Cannot be captured; its layers can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> _Box:
        return _Box(self.down(torch.relu(self.up(x))))


def _uncapturable() -> tuple[list[float], list[str], list[int]]:
    torch.manual_seed(0)
    model = _GivesABox()
    batch = torch.randn(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, result, _ = auto_accelerate(
            model,
            torch.optim.SGD,
            loss_func=lambda batch, output: (output.value - batch).square().mean(),
            optim_args={"lr": 0.5},
            sample_batch=batch,
            load_strategy=[MESH, "operator_parallel"] if dist.is_initialized() else [],
        )
    assert result is not None
    losses = [float(result.train_step(batch)) for _ in range(3)]
    said = [str(one.message) for one in caught if "operator_parallel" in str(one.message)]
    rows = [row.why for row in result.report.rows if row.name == "operator_parallel"]
    return losses, said + rows, [p.numel() for p in result.job.module.parameters()]


def test_a_model_that_cannot_be_captured_has_its_layers_divided() -> None:
    alone, _, _ = _uncapturable()
    first, second = run_ranks(_uncapturable, 2, timeout_s=60)
    for losses, _, _ in (first, second):
        assert losses == pytest.approx(alone, rel=1e-6)
    warned, row = first[1]
    for text in (warned, row):
        assert "layers are divided instead, as tensor_parallel does" in text
        assert "_GivesABox returns _Box, a container that cannot be opened" in text
    assert "up" in row


def units() -> tuple[int, int, str]:
    """The units of fsdp, the blocks that are recomputed, and the strategy that was applied, as its file."""
    from tests.opt_lib.scenarios import accelerate_case

    result = accelerate_case(CASES["hf_llama"], [BOTH, anything(3), "fsdp", "checkpoint"])
    modules = list(result.job.module.modules())
    sharded = sum(type(module).__name__.startswith("FSDP") for module in modules)
    recomputed = sum("CheckpointWrapper" in type(module).__name__ for module in modules)
    return sharded, recomputed, result.job.resolved_settings["operator_parallel"]["plan"]["note"]


def test_blocks_stay_units() -> None:
    (found, *_) = run_ranks(units, 4)
    layers = 2
    assert found[:2] == (layers + 1, layers)  # with the root
    assert found[2] == "random, seed 3"


def applied(config: dict[str, Any]) -> str:
    from tests.opt_lib.scenarios import accelerate_case

    try:
        accelerate_case(CASES["hf_llama"], [MESH, ("operator_parallel", config)])
    except (InputError, StrategyError) as error:
        return str(error)
    return ""


def test_plans_are_files_and_misfits_are_named(tmp_path: Path) -> None:
    plan = OperatorPlan(operators={}, degree=2).as_json()
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**plan, "operators": {"model.layers.*.mlp.down_proj/linear#0": "1 <- 2,1"}}))
    key = "model.layers.*.mlp.down_proj/linear#0"
    (refusal, other) = run_ranks(applied, 2, args=({"plan": str(file)},))
    assert refusal == other
    assert f"{key}: 1 <- 2,1 is not a legal rule of this call. Legal are" in refusal
    file.write_text(
        json.dumps(
            {
                **plan,
                "operators": {key.replace("down", "dwn"): "P <- 2,1"},
                "parameters": {key[:-9] + ".weight": "5"},
            }
        )
    )
    refusal = run_ranks(applied, 2, args=({"plan": str(file)},))[0]
    assert f"the model has no such key. Did you mean '{key}'" in refusal
    assert "is not divided along 5 by 2 ranks" in refusal
    file.write_text(json.dumps({**plan, "degree": 4}))
    assert "was made for 4 ranks, but there are 2" in run_ranks(applied, 2, args=({"plan": str(file)},))[0]
    assert run_ranks(applied, 2, args=({"plan": plan},)) == ["", ""]


def other_calls(name: str, strategy: list[Any], sizes: list[int]) -> list[float]:
    """Losses of steps on batches of several sizes, with evaluations in between."""
    case = CASES[name]
    result = accelerate_case(case, strategy)
    losses = []
    for seed, rows in enumerate(sizes):
        losses.append(float(result.train_step(case.make_batch(rows, seed))))
        losses.append(float(result.train_step.evaluate(case.make_batch(rows, 9))))
    return losses


@pytest.mark.parametrize("plan", [BATCH, anything(3)], ids=["batch", "random"])
def test_calls_that_the_plan_does_not_fit_are_divided_anew(plan: Any) -> None:
    sizes = [
        3,
        4,
        5,
        1,
    ]  # the first capture of any, of one that is divided, one more for that, and a single sample
    reference = other_calls("hf_llama", [], sizes)
    for losses in run_ranks(other_calls, 2, args=("hf_llama", [MESH, plan], sizes), timeout_s=220):
        assert losses == pytest.approx(reference, rel=1e-5)


class Annealed(torch.nn.Module):
    """Reads an attribute that its owner changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x) / self.temperature
        return found


def annealed(strategy: list[Any]) -> tuple[list[float], list[int]]:
    """Losses while an attribute changes that is read, and one that is not; and how many captures there were by step."""
    from atorch_ns.operators.divided import run

    captures, capture = [0], run.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        captures[0] += 1
        return capture(*args, **kwargs)

    run.capture = counted
    model: Any = Annealed()
    model.seen = 0
    _, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        torch.randn(8, 8, generator=torch.Generator().manual_seed(1)),
        lambda batch, output: (output - batch).square().mean(),
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 4},
        load_strategy=strategy,
    )
    assert result is not None
    losses, counts = [], []
    for step in range(6):
        model.temperature = 1.0 + min(step, 2)
        for batch in result.dataloader:
            model.seen += 1
            losses.append(float(result.train_step(batch)))
        counts.append(captures[0])
    run.capture = capture
    return losses, counts


def test_an_attribute_that_changes_between_steps_counts_if_it_is_read() -> None:
    reference, _ = annealed([])
    for losses, counts in run_ranks(annealed, 2, args=([MESH, anything(1)],), timeout_s=220):
        assert losses == pytest.approx(reference, rel=1e-5)
        assert counts[-1] == counts[2]
        assert counts[0] < counts[1] < counts[2]


def test_settings_that_nothing_would_use() -> None:
    (text, _) = run_ranks(applied, 2, args=({"policy": "batch", "memory_gib": 1.0},))
    assert "memory_gib can be used only with policy=solve, but it is batch" in text


@pytest.mark.parametrize("name", named(("mlp", "hf_gpt2", "hf_llama"), often=("mlp", "hf_gpt2")))
def test_stages_of_a_pipeline(name: str) -> None:
    mesh = ("parallel_mode", [("tensor", 2), ("pipeline", 2)])
    stages = ("pipeline_parallel", {"num_micro_batches": 2})
    strategies = {
        "found": [mesh, stages, "operator_parallel"],
        "the batch": [mesh, stages, BATCH],
        "at random": [mesh, stages, anything(1)],
        "at random, with checkpoint": [mesh, stages, anything(4), "checkpoint"],
    }
    check(CASES[name], 4, strategies)


def test_evaluation_in_a_pipeline() -> None:
    mesh = ("parallel_mode", [("tensor", 2), ("pipeline", 2)])
    strategy = [mesh, ("pipeline_parallel", {"num_micro_batches": 2}), anything(5)]
    reference = other_calls("hf_llama", [], [4, 6])
    for losses in run_ranks(other_calls, 4, args=("hf_llama", strategy, [4, 6]), timeout_s=220):
        assert losses == pytest.approx(reference, rel=1e-5)


def test_too_little_memory_names_what_needs_it() -> None:
    (text, _) = run_ranks(applied, 2, args=({"memory_gib": 1e-6},))
    assert "no division fits in 1.05 KiB of memory: at least " in text
    assert "The largest parts are the two largest peaks inside operators" in text


def test_constraints_are_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "constraints.yaml"
    file.write_text("- name: linear\n  allowed_partition_dims: []\n  replica_allowed: true\n")

    def rules() -> list[str]:
        from tests.opt_lib.scenarios import accelerate_case

        config = {"constraints": str(file), "memory_gib": 0.0015}
        result = accelerate_case(CASES["hf_llama"], [MESH, ("operator_parallel", config)])
        plan = result.job.resolved_settings["operator_parallel"]["plan"]
        return [key for key in plan["operators"] if "/linear#" in key]

    assert run_ranks(rules, 2) == [[], []]
