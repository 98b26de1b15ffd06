"""Steps after inference, gradients reduced late, and outputs that one rank asks for: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import attach_optimizer, auto_accelerate
from atorch_ns.errors import InputError
from atorch_ns.testing.workers import run_ranks


class Model(nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
            self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


def ids(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(16, (rows, 6), generator=torch.Generator().manual_seed(seed))


def accelerated(strategy: list[Any], **given: Any) -> Any:
    given = {"optim_func": torch.optim.SGD, "optim_args": {"lr": 0.5}} | given
    return auto_accelerate(Model(), loss_func=loss, load_strategy=strategy, sample_batch=ids(2), **given)[1]


def norm_of_one_process(batches: list[torch.Tensor]) -> float:
    model = Model()
    (sum(loss(batch, model(batch)) for batch in batches) / len(batches)).backward()  # type: ignore[union-attr]
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))


def step_after_inference(strategy: list[Any]) -> float:
    result = accelerated(strategy, max_grad_norm=1e9)
    result.infer_step([ids(3)] * 2)  # before any training on batches of such shapes
    result.train_step.micro_steps([ids(3, 1), ids(3, 2)])
    return float(result.train_step.grad_norm)


@pytest.mark.parametrize("strategy", [[("parallel_mode", ([("pipeline", 2)], None))], ["fsdp"]])
def test_inference_before_training_changes_nothing(strategy: list[Any]) -> None:
    norms = run_ranks(step_after_inference, 2, args=(strategy,))
    assert norms == pytest.approx([norm_of_one_process([ids(3, 1), ids(3, 2)])] * 2, rel=1e-5)


def step_with_late_optimizer(strategy: list[Any]) -> float:
    result = accelerated(strategy, optim_func=None, optim_args=None, max_grad_norm=1e9)
    result.infer_step([ids(3)])
    result = attach_optimizer(result, torch.optim.SGD, lr=0.5)
    result.train_step.micro_steps([ids(3, 1), ids(3, 2)])
    return float(result.train_step.grad_norm)


@pytest.mark.parametrize("name", ["fsdp", "zero2"])
def test_an_optimizer_that_joins_after_inference_trains_what_is_sharded(name: str) -> None:
    norms = run_ranks(step_with_late_optimizer, 2, args=([name],))
    assert norms == pytest.approx([norm_of_one_process([ids(3, 1), ids(3, 2)])] * 2, rel=1e-5)


def reduced_late() -> tuple[float, bool]:
    result = accelerated([("ddp", {"reducer": "own"})])
    mine = ids(3, 1 + result.rank)
    with result.no_sync():
        result.loss_func(mine, result.model(mine)).backward()
    result.reducer.sync_grad()
    gradients = [p.grad for p in result.model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)), result.reducer.synchronised


def test_sync_grad_reduces_what_passes_under_no_sync_have_left() -> None:
    expected = norm_of_one_process([ids(3, 1), ids(3, 2)])
    for norm, synchronised in run_ranks(reduced_late, 2):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert synchronised


def outputs_of_one_rank() -> list[tuple[int, ...]]:
    result = accelerated([("parallel_mode", ([("tensor", 2)], None))])
    step = result.train_step.micro_steps([ids(3)], outputs=result.rank == 0)
    return [tuple(output.mean(0).shape) for output in step.outputs] if result.rank == 0 else []  # by itself


def test_outputs_of_tensor_parallelism_are_whole_on_the_rank_that_asks() -> None:
    assert run_ranks(outputs_of_one_rank, 2) == [[(6, 16)], []]


def unlike(strategy: list[Any]) -> str:
    result = accelerated(strategy)
    try:
        result.train_step.micro_steps([ids(2 + result.rank), ids(3)])
    except InputError as error:
        return str(error)
    return ""


def test_ranks_of_a_pipeline_that_are_given_other_shapes_are_told() -> None:
    texts = run_ranks(unlike, 2, args=([("parallel_mode", ([("pipeline", 2)], None))],))
    assert all(
        "ranks 0 and 1 work on the same data" in text and "differ in their shapes" in text for text in texts
    )
