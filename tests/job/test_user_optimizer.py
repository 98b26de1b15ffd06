"""What ``optim_func`` is called with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from atorch_ns import checkpoint
from atorch_ns.errors import CheckpointError, InputError
from atorch_ns.job import Result
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import catch_ranks, run_ranks


def by_dimensions(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """Decays matrices alone, in groups of its own."""
    listed = list(parameters)
    decayed = [parameter for parameter in listed if parameter.ndim >= 2]
    others = [parameter for parameter in listed if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=lr
    )


def _trained(strategy: Sequence[Any], steps: int = 2) -> Result:
    torch.manual_seed(0)
    result = accelerate_case(
        get_case("mlp"), strategy, optim_func=by_dimensions, optim_args={"lr": 0.01}, steps=steps
    )
    assert result.dataloader is not None
    for batch in result.dataloader:
        result.train_step(batch)
    return result


def _optimizer(result: Result) -> torch.optim.Optimizer:
    assert result.optim is not None
    return result.optim


@pytest.mark.parametrize("strategy", [[], [("half", "bf16")]], ids=str)
def test_a_function_that_filters_parameters_makes_its_own_groups(strategy: Sequence[Any]) -> None:
    groups = _optimizer(_trained(strategy)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [{parameter.ndim for parameter in group["params"]} for group in groups] == [{2}, {1}]


def test_its_groups_are_named_in_checkpoints(tmp_path: Path) -> None:
    saved = _trained([])
    checkpoint.save(tmp_path / "one", saved)
    loaded = _trained([], steps=1)
    checkpoint.load(tmp_path / "one", loaded)
    for mine, other in zip(loaded.model.parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(
            _optimizer(loaded).state[mine]["exp_avg"], _optimizer(saved).state[other]["exp_avg"]
        )


def test_a_checkpoint_of_its_groups_is_refused_by_one_group(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", _trained([]))
    one_group = accelerate_case(get_case("mlp"), [], steps=1)
    with pytest.raises(CheckpointError, match="group"):
        checkpoint.load(tmp_path / "one", one_group)


def _dimensions(strategy: Sequence[Any]) -> list[set[int]]:
    return [
        {parameter.ndim for parameter in group["params"]}
        for group in _optimizer(_trained(strategy)).param_groups
    ]


@pytest.mark.parametrize("strategy", [["ddp"], ["fsdp"]], ids=str)
def test_whole_and_row_sharded_parameters_come_as_a_list(strategy: Sequence[Any]) -> None:
    assert run_ranks(_dimensions, 2, args=(strategy,), timeout_s=60)[1] == [{2}, {1}]


def test_where_parameters_are_divided_it_is_said_to_group_by_optim_param_func() -> None:
    for outcome in catch_ranks(_dimensions, 2, args=(["zero1"],), timeout_s=60):
        assert isinstance(outcome.error, InputError)
        assert "split groups by optim_param_func" in outcome.message


def test_an_attribute_error_of_the_function_itself_is_left_as_it_is() -> None:
    def broken(parameters: Any) -> torch.optim.Optimizer:
        return parameters.missing  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="missing"):
        accelerate_case(get_case("mlp"), [], optim_func=broken, optim_args={})
