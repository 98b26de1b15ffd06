"""What a pipeline checks while it trains: equal weights, a loss of outputs alone, errors that reach every rank."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns import Result, auto_accelerate
from atorch_ns.pipeline import get_schedule
from atorch_ns.testing.parity import whole_parameters
from atorch_ns.testing.workers import run_ranks
from opt_lib._model_axes.pipeline_cut import _as_first_rank
from opt_lib._model_axes.pipeline_plan import PipelinePlan

TWO = [("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"num_micro_batches": 2})]


def _build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def _result(model: nn.Module, loss_func: Any) -> Result:
    _, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        torch.ones(8, 4),
        loss_func,
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 4},
        load_strategy=TWO,
    )
    assert result is not None
    return result


def _mean_square(batch: Tensor, output: Tensor) -> Tensor:
    return F.mse_loss(output, batch)


def _weights_of_other_seeds() -> tuple[dict[str, Tensor], str]:
    result = _result(_build(dist.get_rank()), _mean_square)
    return whole_parameters(result), str(result.applied)


def test_ranks_with_other_weights_take_those_of_the_first() -> None:
    for weights, applied in run_ranks(_weights_of_other_seeds, 2):
        for name, value in _build(0).named_parameters():
            assert torch.equal(weights[name], value), name
        assert "8 of 8 parameters and buffers differed" in applied


def _failing(kind: str) -> tuple[str, float]:
    model = _build(0)
    head = model.get_submodule("3")

    def loss_func(batch: Tensor, output: Tensor) -> Tensor:
        if kind == "raises":
            raise ValueError("this loss is broken")
        assert isinstance(head.weight, Tensor)
        return _mean_square(batch, output) + head.weight.square().sum()

    result = _result(model, loss_func)
    began = time.monotonic()
    try:
        result.train_step(torch.ones(4, 4))
    except Exception as error:
        seconds = time.monotonic() - began
        if kind == "raises":
            time.sleep(12)  # this rank lives on: the others must not have to wait for its end
        return f"{type(error).__name__}: {error}", seconds
    return "no error", 0.0


def test_an_error_in_the_loss_reaches_every_rank_with_its_cause() -> None:
    (first, seconds), (last, _) = run_ranks(_failing, 2, args=("raises",), timeout_s=60)
    assert first.startswith("RankError: rank 1 (stage 1) failed: ValueError: this loss is broken")
    assert last.startswith("StepError: rank 1 (stage 1) failed: ValueError: this loss is broken")
    assert seconds < 10  # before the other rank ends, and the group's timeout


def test_a_loss_that_reads_parameters_is_refused() -> None:
    (first, _), (last, _) = run_ranks(_failing, 2, args=("penalty",), timeout_s=60)
    assert "loss_func computes with 3.weight, a parameter of the model" in last
    assert "loss_func computes with 3.weight" in first


def test_the_decision_of_the_first_rank_holds_with_its_shares_and_micro_batches() -> None:
    fields = {field.name: cast(Any, None) for field in dataclasses.fields(PipelinePlan)}
    decision = {"stages_per_rank": 1, "num_micro_batches": 2, "cuts": (2,), "shares": (0.5, 0.5)}
    plan = PipelinePlan(**{**fields, "info": get_schedule("1F1B"), **decision})
    for other in ({"shares": (1.0, 0.0)}, {"num_micro_batches": 4}, {"cuts": (1,)}):
        first = dataclasses.replace(plan, **other)
        message = (first.info.name, 1, first.num_micro_batches, first.cuts, first.shares)
        cluster = SimpleNamespace(from_first=lambda _, message=message: message)
        assert _as_first_rank(cast(Any, SimpleNamespace(cluster=cluster)), plan) == first
