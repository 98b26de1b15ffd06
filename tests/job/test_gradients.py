"""Sums of gradients over ranks that see parts of one thing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from atorch_ns.job.gradients import GradientSums, gradient_norm
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
        (False, {"both": [3.0, 3.0], "one": [3.0, 3.0], "none": None}),
    ],
)
def test_both_ranks_have_the_same(mean: bool, expected: dict[str, list[float] | None]) -> None:
    assert run_ranks(_gradients, 2, args=(mean,), timeout_s=30) == [expected, expected]


def _freeze_between_passes() -> dict[str, list[float] | None]:
    model, sums = Parts(), GradientSums()
    assert dist.group.WORLD is not None
    sums.add(["both", "one", "none"], dist.group.WORLD)
    sums.watch(model)
    for trained in (True, False):  # both passes belong to one step
        model.one.requires_grad_(trained)
        model().backward()
        sums.run(model)
    return {name: value.grad.tolist() for name, value in model.named_parameters() if value.grad is not None}


def test_what_is_frozen_between_two_passes_keeps_its_gradient() -> None:
    expected = {"both": [6.0, 6.0], "one": [3.0, 3.0]}
    assert run_ranks(_freeze_between_passes, 2, timeout_s=30) == [expected, expected]


def test_parameters_that_are_replaced_are_let_go() -> None:
    model, sums = nn.Linear(2, 2), GradientSums()
    sums.watch(model)
    first = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    gc.collect()
    assert first() is None


def _large() -> nn.Module:
    """Millions of elements in one parameter, a tied one, and one that is not contiguous."""
    model = nn.Sequential(nn.Embedding(5000, 600), nn.Linear(600, 600), nn.Linear(600, 5000, bias=False))
    model[2].weight = model[0].weight
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    weight = model[1].weight
    assert weight.grad is not None
    weight.grad = weight.grad.t()
    return model


def _exact(model: nn.Module, norm_type: float) -> float:
    grads = [
        parameter.grad.double().reshape(-1) for parameter in model.parameters() if parameter.grad is not None
    ]
    return float(torch.linalg.vector_norm(torch.cat(grads), norm_type))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_of_millions_of_elements_is_exact_to_rounding(norm_type: float, dtype: torch.dtype) -> None:
    model = _large().to(dtype)
    assert float(gradient_norm(model.parameters(), norm_type)) == pytest.approx(
        _exact(model, norm_type), rel=1e-6
    )


def _sharded_norms() -> list[float]:
    """Divided over ranks, divided over both axes of a mesh, and each rank with parameters of its own."""
    found = []
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
        model = _large()
        parameters = []
        for parameter in model.parameters():
            placements = (
                [Shard(0), Shard(0)]
                if mesh.ndim == 2 and parameter.ndim == 2
                else [Shard(0), Replicate()][: mesh.ndim]
            )
            parameters.append(nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
            assert parameter.grad is not None
            parameters[-1].grad = distribute_tensor(parameter.grad.contiguous(), mesh, placements)
        found.append(float(gradient_norm(parameters)))
    own = list(_large().parameters())[dist.get_rank() :: 4]
    found.append(float(gradient_norm(own, stages=dist.group.WORLD)))
    return found


def test_the_norm_of_divided_gradients_is_exact_to_rounding() -> None:
    expected = _exact(_large(), 2.0)
    for norms in run_ranks(_sharded_norms, 4, timeout_s=60):
        assert norms == pytest.approx([expected] * 3, rel=1e-6)
