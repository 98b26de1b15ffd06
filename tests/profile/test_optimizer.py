"""What optimizers keep, against their real states and temporaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.profile.optimizer import optimizer_spec


@pytest.mark.parametrize(
    ("make", "states", "fixed", "factored"),
    [
        (torch.optim.AdamW, 2, 4, 0),
        (partial(torch.optim.Adam, amsgrad=True), 3, 4, 0),
        (partial(torch.optim.SGD, lr=0.1), 0, 0, 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1, 0, 0),
        (torch.optim.Adagrad, 1, 4, 0),
        (torch.optim.Adafactor, 0, 4, 2),
    ],
)
def test_states(make: Callable[..., torch.optim.Optimizer], states: int, fixed: int, factored: int) -> None:
    spec, notes = optimizer_spec(make, "cpu")
    assert spec is not None
    assert notes == ()
    assert spec.state_dtypes == ("same",) * states
    assert (spec.fixed_bytes, len(spec.factored_dtypes)) == (fixed, factored)
    parameter = nn.Parameter(torch.ones(12, 20))
    optimizer = make([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    real = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    rows_and_columns = 4 * (12 + 20) if factored else 0
    assert real == states * 12 * 20 * 4 + fixed + rows_and_columns


def test_temporaries() -> None:
    loop, _ = optimizer_spec(partial(torch.optim.AdamW, foreach=False), "cpu")
    foreach, _ = optimizer_spec(partial(torch.optim.AdamW, foreach=True), "cpu")
    fused, _ = optimizer_spec(partial(torch.optim.AdamW, fused=True), "cpu")
    assert loop is not None
    assert foreach is not None
    assert fused is not None
    assert (loop.temporary_copies, loop.parameter_temporaries) == (0, 3)
    assert (foreach.temporary_copies, foreach.parameter_temporaries) == (1, 0)
    assert (fused.temporary_copies, fused.parameter_temporaries) == (0, 0)


def test_a_gpu_uses_foreach_by_default() -> None:
    default, _ = optimizer_spec(torch.optim.AdamW, "cuda")
    told, _ = optimizer_spec(partial(torch.optim.AdamW, foreach=False), "cuda")
    assert default is not None
    assert told is not None
    assert (default.temporary_copies, told.temporary_copies) == (1, 0)


def test_without_an_optimizer() -> None:
    assert optimizer_spec(None, "cpu") == (None, ())


def test_one_that_cannot_be_tried_is_a_note() -> None:
    spec, (note,) = optimizer_spec(torch.optim.LBFGS, "cpu")
    assert spec is not None
    assert spec.state_dtypes == ("same", "same")
    assert "closure" in note


class Divided(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, in one class."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        every = list(params)
        super().__init__(every, {"lr": lr})
        self.parts = [
            torch.optim.Muon([one for one in every if one.ndim == 2], lr=lr),
            torch.optim.AdamW([one for one in every if one.ndim != 2], lr=lr),
        ]

    def step(self, closure: Any = None) -> None:
        """Steps both."""
        for part in self.parts:
            part.step()


def test_the_states_of_optimizers_that_an_optimizer_holds_are_its_states() -> None:
    spec, notes = optimizer_spec(Divided, "cpu")
    alone, _ = optimizer_spec(torch.optim.Muon, "cpu")
    assert spec is not None
    assert alone is not None
    assert (spec.name, spec.state_dtypes, notes) == ("Divided", ("same",), ())
    assert spec.parameter_temporaries == alone.parameter_temporaries > 0
