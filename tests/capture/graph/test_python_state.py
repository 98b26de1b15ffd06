"""What a model's code reads and does beside arguments: captured anew when it changes, refused where a graph would not repeat it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns.capture.graph.capture import CaptureError, capture
from atorch_ns.capture.graph.python_state import PythonState, carry_state

CPU = torch.device("cpu")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.temperature, self.history = 0, 1.0, [1]
        self.draws = random.Random(1)
        self.mode: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _Counts(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class _Assigns(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return super().forward(x) + self.seen


class _AssignsData(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data = self.seen + 1
        return super().forward(x)


class _Draws(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class _DrawsByNumpy(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * np.random.rand()


class _DrawsOfItsOwn(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.draws.random()


class _Remembers(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(1)
        return super().forward(x)


class _Applies(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Double.apply(x))


class _Hooks(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y


class _WritesToItsInput(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return super().forward(x)


class _Maps(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.inner)(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_Counts, "changes calls"),
        (_Assigns, "changes seen"),
        (_AssignsData, "assigns the data of a tensor"),
        (_Draws, "random numbers from Python or NumPy"),
        (_DrawsByNumpy, "random numbers from Python or NumPy"),
        (_DrawsOfItsOwn, "changes draws"),
        (_Remembers, "changes history"),
        (_Applies, "calls _Double, an autograd.Function"),
        (_Hooks, "registers a hook on a tensor"),
        (_WritesToItsInput, "writes to an argument"),
        (_Maps, "transforms functions"),
    ],
)
def test_what_a_graph_would_not_repeat_is_refused(kind: type[_Model], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(kind(), (torch.randn(2, 4),), {}, device=CPU)


def test_a_hook_on_a_part_is_refused_and_one_on_the_model_runs_where_it_is_called() -> None:
    model = _Model()
    model.register_forward_hook(lambda module, args, result: result * 2)
    plain = {node.target for node in capture(_Model(), (torch.randn(2, 4),), {}, device=CPU).graph.nodes}
    assert {node.target for node in capture(model, (torch.randn(2, 4),), {}, device=CPU).graph.nodes} == plain
    model.inner.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(CaptureError, match="inner has a forward hook"):
        capture(model, (torch.randn(2, 4),), {}, device=CPU)


class _Settles(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode is None:
            self.mode = "regression"
        return super().forward(x)


class _WritesInPlace(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return super().forward(x) + self.seen


@pytest.mark.parametrize("kind", [_Settles, _WritesInPlace, nn.LSTM])
def test_what_settles_and_what_is_written_in_place_is_captured(kind: Any) -> None:
    model = nn.LSTM(4, 4) if kind is nn.LSTM else kind()
    x = torch.randn(2, 3, 4) if kind is nn.LSTM else torch.randn(2, 4)
    assert list(capture(model, (x,), {}, device=CPU).graph.nodes)


def test_gradients_are_on_as_they_are_for_the_caller() -> None:
    class Branches(_Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if torch.is_grad_enabled() else -super().forward(x)

    def names() -> list[str]:
        return [
            str(node.target) for node in capture(Branches(), (torch.randn(2, 4),), {}, device=CPU).graph.nodes
        ]

    assert "aten.neg.default" not in names()
    with torch.no_grad():
        assert "aten.neg.default" in names()


class _ReadsThroughOthers(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.limit, self.unread = 5, 0

    @property
    def reached(self) -> bool:
        return self.calls > self.limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.reached else 1)


def test_attributes_count_that_are_read_also_by_properties_and_before_they_matter() -> None:
    model = _ReadsThroughOthers()
    kind = type(model)
    captured = capture(model, (torch.randn(2, 4),), {}, device=CPU)
    assert {("", "calls"), ("", "limit")} <= captured.reads
    assert ("", "unread") not in captured.reads
    state = PythonState(model, captured.reads)
    model.unread = 1
    assert state.holds()
    model.calls = 1
    assert not state.holds()
    assert list(state.changed()) == ["calls"]
    assert type(model) is kind


def test_a_change_of_an_attribute_is_seen_and_carried() -> None:
    model, copy = _Model(), _Model()
    state = PythonState(model)
    assert state.holds()
    for change in (
        lambda: setattr(model, "temperature", 2.0),
        lambda: model.history.append(2),
        lambda: setattr(model.inner, "scale", 3),
        model.draws.random,
    ):
        before = PythonState(model)
        change()
        assert before.changed()
    assert not state.holds()
    carry_state(model, copy)
    assert (copy.temperature, copy.history, copy.inner.scale) == (2.0, [1, 2], 3)
