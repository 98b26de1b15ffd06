"""The loss as the user reads it, and what surrounds it: autocast, casts and the scale of gradients."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.job import Autocast, LossScaling, first_loss
from atorch_ns.job.loss import ForwardScope, LossScaler, cast_inputs, wrap_loss

BF16 = Autocast("cpu", torch.bfloat16)


class Parts(NamedTuple):
    loss: torch.Tensor
    accuracy: float


def _identity(batch: Any, output: Any) -> Any:
    return output


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "returned float"), ([], "returned list"), (torch.ones(2), r"shape \(2,\).*\.mean\(\)")],
    ids=str,
)
def test_what_is_no_loss_is_refused(value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        first_loss(value)


def test_a_loss_of_one_element_is_one() -> None:
    assert first_loss((torch.ones(1, 1), "more")).shape == (1, 1)


def test_nothing_around_it_leaves_the_users_function() -> None:
    assert wrap_loss(_identity, autocast=None, scaler=None, upcast=False) is _identity


def test_outputs_are_upcast_and_autocast_is_on() -> None:
    def loss(batch: Any, output: Any) -> Any:
        return output["logits"].dtype, (output["logits"] @ output["logits"]).dtype, output["ids"].dtype

    wrapped = wrap_loss(loss, autocast=BF16, scaler=None, upcast=True)
    output = {"logits": torch.ones(2, 2, dtype=torch.bfloat16), "ids": torch.ones(2, dtype=torch.int64)}
    assert wrapped(None, output) == (torch.float32, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: [t, 1], lambda t: (t, 1), lambda t: Parts(t, 0.5)])
def test_the_scale_enters_in_the_backward_pass_alone(make: Any) -> None:
    scaler = LossScaler("cpu", LossScaling(init_scale=8.0))
    weight = nn.Parameter(torch.tensor(3.0))
    value = wrap_loss(_identity, autocast=None, scaler=scaler, upcast=False)(None, make(weight * 1.0))
    assert type(value) is type(make(weight * 1.0))
    assert first_loss(value).item() == 3.0
    first_loss(value).backward()
    assert weight.grad == 8.0
    assert scaler.num_backwards == 1
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert scaler.unscale(optimizer) is False
    scaler.step(optimizer)
    assert float(weight) == 2.0
    assert scaler.num_backwards == 0


def test_an_overflow_is_found_and_the_scale_is_halved() -> None:
    scaler = LossScaler("cpu", LossScaling(init_scale=8.0))
    weight = nn.Parameter(torch.tensor(3.0))
    scaler.scaled(weight * float("inf")).backward()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert scaler.unscale(optimizer) is True
    scaler.step(optimizer)
    assert float(weight) == 3.0
    assert scaler.scaler.get_scale() == 4.0


def test_inputs_are_cast_wherever_they_are() -> None:
    class Model(nn.Module):
        def forward(self, x: Any, *, more: Any) -> list[torch.dtype]:
            return [x.dtype, more["y"][0].dtype, more["ids"].dtype]

    model = Model()
    cast_inputs(model, torch.bfloat16)
    dtypes = model(torch.ones(1), more={"y": [torch.ones(1)], "ids": torch.ones(1, dtype=torch.int32)})
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.int32]


def test_autocast_ends_with_the_forward_pass_also_where_it_fails() -> None:
    model = nn.Linear(2, 2)
    ForwardScope(partial(torch.autocast, "cpu", torch.bfloat16)).attach(model)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert not torch.is_autocast_enabled("cpu")
    copied = pickle.loads(pickle.dumps(model))
    assert copied(torch.ones(1, 2)).dtype == torch.bfloat16
