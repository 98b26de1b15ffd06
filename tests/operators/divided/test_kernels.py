"""Kernels on simulated ranks compute what the operator does on the whole."""

from __future__ import annotations

import pytest
import torch

from atorch_ns.operators.divided.kernels import (
    embedding_rows,
    loss_over_classes,
    loss_over_samples,
    mean_of_parts,
)
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.sharding.collectives import simulate

aten = torch.ops.aten
CPU = torch.device("cpu")
RULE = Rule.read("P <- 0,R")


@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_rows_of_a_table_are_summands_and_padding_learns_nothing(padding: int) -> None:
    table, ids = torch.randn(8, 4, requires_grad=True), torch.tensor([[0, 5, 5], [7, 3, 0]])
    whole = aten.embedding(table, ids, padding)
    whole.square().sum().backward()

    def look_up(group: object) -> tuple[torch.Tensor, torch.Tensor]:
        rows = table.detach().chunk(2)[group.rank()].clone().requires_grad_()  # type: ignore[attr-defined]
        found = embedding_rows(group, RULE, aten.embedding.default, rows, ids, padding)  # type: ignore[arg-type]
        found.backward(2 * whole.detach())
        assert rows.grad is not None
        return found.detach(), rows.grad

    results, gradients = zip(*simulate(2, look_up, CPU), strict=True)
    torch.testing.assert_close(sum(results), whole.detach())
    torch.testing.assert_close(torch.cat(gradients), table.grad)
    assert padding < 0 or not table.grad[padding].any()  # type: ignore[index]


def test_a_mean_is_the_sum_of_its_parts() -> None:
    x = torch.randn(8, 4)
    parts = simulate(
        4, lambda group: mean_of_parts(group, RULE, aten.mean.dim, x.chunk(4)[group.rank()], [0]), CPU
    )
    torch.testing.assert_close(sum(parts), x.mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_counts_the_targets_of_all_ranks(dtype: torch.dtype) -> None:
    """Ranks have 3 and 1021 targets: half precision holds neither their sum nor that of the losses."""
    scores = torch.randn(2048, 8).to(dtype)
    targets = torch.randint(0, 8, (2048,))
    targets[3:1024] = targets[2045:] = -100
    whole = aten.cross_entropy_loss(scores.float(), targets)
    losses = simulate(
        2,
        lambda group: loss_over_samples(
            group,
            RULE,
            aten.cross_entropy_loss.default,
            scores.chunk(2)[group.rank()],
            targets.chunk(2)[group.rank()],
        ),
        CPU,
    )
    assert losses[0] == losses[1]
    assert losses[0].dtype == dtype
    # The operator rounds log-probabilities and their sum, and the result is rounded: 2^-8 of each at most.
    tolerance = 1e-5 if dtype == torch.float32 else 3 * 2**-8
    torch.testing.assert_close(losses[0].float(), whole, rtol=tolerance, atol=0)


def test_a_loss_without_a_target_is_nan_as_on_the_whole() -> None:
    scores, targets = torch.randn(4, 8), torch.full((4,), -100)
    losses = simulate(
        2,
        lambda group: loss_over_samples(
            group, RULE, aten.cross_entropy_loss.default, scores.chunk(2)[group.rank()], targets[:2]
        ),
        CPU,
    )
    assert all(loss.isnan() for loss in losses)


@pytest.mark.parametrize("dim", [0, 1])
def test_classes_are_divided_with_scores_that_overflow_alone(dim: int) -> None:
    scores = torch.randn((8,) if dim == 0 else (4, 8)) * 1e3
    targets = torch.tensor(5) if dim == 0 else torch.tensor([0, 7, 5, 2])
    losses = simulate(
        2,
        lambda group: loss_over_classes(
            group, RULE, aten.cross_entropy_loss.default, scores.chunk(2, dim)[group.rank()], targets
        ),
        CPU,
    )
    torch.testing.assert_close(losses, [aten.cross_entropy_loss(scores, targets)] * 2)
