"""Evaluation of batches of any size: the mean over all rows, as in one process, whatever micro-batches there are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atorch_ns import auto_accelerate
from atorch_ns.testing.workers import run_ranks
from tests.job.test_loops import BATCH, DATA_PARALLEL, TENSOR, Net, X, accelerated, mean_square

ACCUMULATION = ("gradient_accumulation", 4)
PIPELINE = ("parallel_mode", ([("pipeline", 2)], None))
STRATEGIES: dict[str, list[Any]] = {
    **{
        name: [*strategy, ACCUMULATION] for name, strategy in DATA_PARALLEL.items() if name in ("ddp", "fsdp")
    },
    "tensor": [*TENSOR, ACCUMULATION],
    "pipeline": [PIPELINE, ("pipeline_parallel", {"num_micro_batches": 4})],
    "interleaved": [PIPELINE, ("pipeline_parallel", {"num_micro_batches": 4, "schedule": "Interleaved1F1B"})],
    "deepspeed": [PIPELINE, ("ds_3d_parallel", {"num_micro_batches": 4})],
}
SIZES = (BATCH, 7, 5, 3, 1)

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::FutureWarning")]


def _evaluated(strategy: list[Any]) -> list[float]:
    result = accelerated(Net(), strategy)
    return [float(result.train_step.evaluate(X[:size])) for size in SIZES]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_batch_that_micro_batches_do_not_divide(name: str) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    model = Net().requires_grad_(False)
    expected = [float(mean_square(X[:size], model(X[:size]))) for size in SIZES]
    for found in run_ranks(_evaluated, 2, args=(STRATEGIES[name],), timeout_s=60):
        assert found == pytest.approx(expected, rel=1e-5)


def _of_unequal_ranks(strategy: list[Any]) -> list[float]:
    result = accelerated(Net(), strategy)
    sizes = ((5, 3), (7, 1), (8, 2), (3, 0))
    ranks = [(X[:first], X[first : first + second]) for first, second in sizes]
    return [float(result.train_step.evaluate(batches[dist.get_rank()])) for batches in ranks]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulates", [True, False])
def test_data_ranks_with_other_numbers_of_rows(name: str, accumulates: bool) -> None:
    model = Net().requires_grad_(False)
    expected = [float(mean_square(X[:size], model(X[:size]))) for size in (8, 8, 10, 3)]
    strategy = STRATEGIES[name] if accumulates else STRATEGIES[name][:1]
    for found in run_ranks(_of_unequal_ranks, 2, args=(strategy,), timeout_s=60):
        assert found == pytest.approx(expected, rel=1e-5)


def _sum(batch: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return (output - batch).square().sum()


def test_a_loss_that_is_a_sum() -> None:
    (_, result, _) = auto_accelerate(
        model := Net(),
        torch.optim.SGD,
        X,
        _sum,
        optim_args={"lr": 1e-2},
        dataloader_args={"batch_size": BATCH},
        load_strategy=[ACCUMULATION],
        loss_reduction="sum",
    )
    assert result is not None
    found = float(result.train_step.evaluate(X[:7]))
    assert math.isclose(found, float(_sum(X[:7], model(X[:7]))), rel_tol=1e-5)
