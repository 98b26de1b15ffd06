"""Optimizers of torch that cannot update DTensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import error_of


class Own(torch.optim.Adafactor):
    """A user's."""


KINDS = (torch.optim.Adafactor, torch.optim.Rprop, Own)


def _accelerated(strategy: Any, kind: Any) -> Any:
    return accelerate_case(get_case("mlp"), strategy, optim_func=kind, optim_args={"lr": 1e-2})


def _refused() -> list[str]:
    strategies = ("fsdp", "zero2")
    return [error_of(partial(_accelerated, [name], kind)) for name in strategies for kind in KINDS]


def test_they_are_refused_before_the_first_step() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    names = ("torch.optim.Adafactor", "torch.optim.Rprop", "Own, of torch.optim.Adafactor,")
    for said, name in zip(first, names * 2, strict=True):
        assert said.startswith(f"InputError: {name} cannot update DTensors")
        assert "zero1" in said


def _trained() -> list[str]:
    wrong = []
    for strategy in (["zero1"], [("zero2", {"not_use_fsdp": True})], ["ddp"]):
        for kind in (torch.optim.Rprop, torch.optim.Adafactor):
            result = _accelerated(strategy, kind)
            if not torch.isfinite(
                torch.stack([result.train_step(batch) for batch in result.dataloader])
            ).all():
                wrong.append(f"{strategy} {kind.__name__}")
    return wrong


def test_what_is_named_instead_trains_them() -> None:
    assert run_ranks(_trained, 2) == [[], []]


def _step(kind: Any) -> str:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    optimizer = kind([parameter], lr=1e-2)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop])
def test_torch_still_fails_with_them(kind: Any) -> None:
    """Once it does not, the optimizer can leave the table of those that are refused."""
    assert all("in-place" in said for said in run_ranks(_step, 2, args=(kind,)))
