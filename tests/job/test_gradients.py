"""Sums of gradients over ranks that see parts of one thing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.job.gradients import GradientSums
from atorch_ns.testing import run_ranks


class Parts(nn.Module):
    """Of its parameters both ranks use one, the first rank another, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.one, self.none = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self) -> torch.Tensor:
        loss = (self.both * (dist.get_rank() + 1)).sum()
        return loss + (3 * self.one).sum() if dist.get_rank() == 0 else loss


def _gradients(mean: bool) -> dict[str, list[float] | None]:
    model, sums = Parts(), GradientSums()
    assert dist.group.WORLD is not None
    sums.add(["both", "one", "none"], dist.group.WORLD, mean=mean)
    sums.watch(model)
    model().backward()
    sums.run(model)
    return {
        name: None if parameter.grad is None else parameter.grad.tolist()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (True, {"both": [1.5, 1.5], "one": [1.5, 1.5], "none": None}),
        (False, {"both": [3.0, 3.0], "one": [3.0, 3.0], "none": [0.0, 0.0]}),
    ],
)
def test_both_ranks_have_the_same(mean: bool, expected: dict[str, list[float] | None]) -> None:
    assert run_ranks(_gradients, 2, args=(mean,), timeout_s=30) == [expected, expected]
