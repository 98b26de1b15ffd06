"""Arguments of auto_accelerate are checked together, and their digest tells where ranks differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.job import Inputs


def _loss(batch: Any, output: Any) -> Any:
    return output.sum()


GOOD = Inputs(
    model=nn.Linear(2, 2),
    optim_func=torch.optim.SGD,
    optim_args={"lr": 0.1, "hook": object()},
    dataset=[torch.ones(2)] * 4,
    loss_func=_loss,
    dataloader_args={"batch_size": 2, "num_workers": 3},
)


def test_everything_wrong_is_said_at_once() -> None:
    wrong = Inputs(
        model=nn.Linear,  # type: ignore[arg-type]
        optim_args={"lr": 0.1},
        optim_param_func="decay",  # type: ignore[arg-type]
        dataset=3,
        lr_scheduler_args={"step_size": 1},
        distributed_sampler_cls=3,  # type: ignore[arg-type]
        gradient_accumulation_steps=True,
        max_grad_norm=0.0,
        model_input_format="star",
    )
    with pytest.raises(InputError) as caught:
        wrong.check()
    for words in (
        "the class Linear; make an instance",
        "optim_param_func must be callable; it is a str",
        "distributed_sampler_cls must be a class; it is an int",
        "gradient_accumulation_steps must be a positive integer; it is True",
        "max_grad_norm must be a positive number or None; it is 0.0",
        "optim_args is given without optim_func",
        "lr_scheduler_args is given without lr_scheduler_cls",
        "dataset must have __getitem__ and __len__, or __iter__; it is an int",
        "model_input_format",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset": None}, "need dataset; it is None"),
        ({"dataset": torch.utils.data.DataLoader([1])}, "pass dataset=None and iterate over yours"),
        ({"model": nn.DataParallel(nn.Linear(2, 2))}, r"already distributed \(DataParallel\)"),
    ],
    ids=["no dataset", "loader", "wrapped"],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], words: str) -> None:
    GOOD.check()
    with pytest.raises(InputError, match=words):
        replace(GOOD, **change).check()


def test_the_digest_differs_in_what_ranks_must_share_and_in_nothing_else() -> None:
    digest = GOOD.digest()
    assert digest["optim_args"].startswith("hook: object, lr=0.1"), (
        "an object is named by its type, not its address"
    )
    alike = replace(GOOD, model=nn.Linear(2, 2), dataloader_args={"batch_size": 2, "num_workers": 0})
    assert alike.digest() == digest
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad = False
    changes: list[tuple[str, dict[str, Any]]] = [
        ("model", {"model": frozen}),
        ("dataset", {"dataset": [torch.ones(2)] * 5}),
        ("dataloader_args", {"dataloader_args": {"batch_size": 4}}),
        ("max_grad_norm", {"max_grad_norm": 1.0}),
    ]
    for key, change in changes:
        other = replace(GOOD, **change).digest()
        assert [name for name in digest if digest[name] != other[name]] == [key]
