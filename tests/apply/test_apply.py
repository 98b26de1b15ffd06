"""A strategy applied in one process: what it leaves alone, whose refusal it was, and a dry run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns.apply import apply_strategy, dry_run
from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Job, Result
from atorch_ns.method import Method, MethodConfig, Phase, Registry, resolve
from atorch_ns.strategy import Strategy

CLUSTER = Cluster(torch="2.13.0")


@final
class Refuses(Method[MethodConfig]):
    """Draws numbers, and refuses."""

    name = "refuses"
    phase = Phase.CAST

    def apply(self, job: Job, config: MethodConfig) -> None:
        torch.rand(1)
        np.random.rand()
        raise InputError("not this model")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, 4]."""
        out: torch.Tensor = self.out(self.norm(x))
        return out


def _inputs(**changes: Any) -> Inputs:
    inputs = Inputs(
        model=Model(),
        optim_func=torch.optim.SGD,
        optim_args={"lr": 0.1},
        dataset=[torch.full((4,), float(index)) for index in range(8)],
        loss_func=lambda batch, output: output.square().mean(),
        dataloader_args={"batch_size": 4, "shuffle": True},
    )
    return replace(inputs, **changes)


def _applied(inputs: Inputs, names: tuple[str, ...] = ()) -> Result:
    return apply_strategy(inputs, CLUSTER, resolve(Strategy(names), CLUSTER, Registry([Refuses])))


def test_a_refusal_names_its_method_and_leaves_the_random_states() -> None:
    inputs = _inputs()
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    with pytest.raises(InputError, match="not this model") as caught:
        _applied(inputs, ("refuses",))
    assert caught.value.refused_by == "refuses"
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]


def test_a_dry_run_leaves_no_trace() -> None:
    result = _applied(_inputs())
    assert result.dataloader is not None
    before = {name: value.clone() for name, value in result.model.state_dict().items()}
    states = torch.get_rng_state(), result.dataloader.state_dict()
    assert dry_run(result).shape == ()
    after = result.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "running statistics among them"
    assert torch.equal(states[0], torch.get_rng_state())
    assert result.dataloader.state_dict() == states[1]
    assert all(parameter.grad is None for parameter in result.model.parameters())


def test_a_dry_run_needs_data_and_a_finite_loss() -> None:
    with pytest.raises(InputError, match="needs dataset"):
        dry_run(_applied(_inputs(dataset=None, dataloader_args=None)))
    infinite = _inputs(loss_func=lambda batch, output: output.sum() * float("inf"))
    with pytest.raises(InputError, match=r"loss is -?(inf|nan)"):
        dry_run(_applied(infinite))


def test_a_scheduler_that_takes_other_arguments_is_named() -> None:
    scheduler = {"lr_scheduler_cls": torch.optim.lr_scheduler.StepLR, "lr_scheduler_args": {"steps": 3}}
    with pytest.raises(InputError, match=r"lr_scheduler_args=\{'steps': 3\}"):
        _applied(_inputs(**scheduler))


def test_parts_that_were_not_given_are_none() -> None:
    result = _applied(Inputs(model=Model()))
    assert (result.optim, result.dataloader, result.loss_func, result.lr_scheduler) == (None,) * 4
    assert result.report.rows == ()
