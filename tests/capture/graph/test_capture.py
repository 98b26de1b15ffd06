"""Capture: the operators of models as users have them, and what cannot be captured."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.capture.graph.capture import capture, flat_arguments
from atorch_ns.errors import InputError
from atorch_ns.operators import DividedForward, OperatorGraph, OperatorPlan, capture_shallow, division_of
from atorch_ns.operators.divided.divide import OperatorDivision
from atorch_ns.sharding.collectives import simulate
from tests.operators.networks import NETWORKS, network

CPU = torch.device("cpu")


def attached(model: nn.Module, group: Any) -> DividedForward:
    """The model, running by its captured graph with nothing divided."""

    def whole(graph: OperatorGraph) -> OperatorDivision:
        return division_of(OperatorPlan(), graph, 2)

    forward = DividedForward(
        model, [block.name for block in repeated_blocks(model)], whole, group, device=CPU
    )
    forward.attach(model)
    return forward


def loss_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output.loss


def gradients(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    output = model(**batch)
    loss_of(output).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output, found


@pytest.mark.parametrize("name", NETWORKS)
def test_the_captured_graph_computes_what_the_model_does(name: str) -> None:
    model, batch = network(name)
    own = copy.deepcopy(model)

    def work(group: Any) -> tuple[Any, dict[str, torch.Tensor], DividedForward]:
        forward = attached(own, group)
        return *gradients(own, batch), forward

    ((output, found, forward),) = simulate(1, work, CPU)
    expected, wanted = gradients(model, batch)
    assert type(output) is type(expected)
    assert float(loss_of(output).detach()) == float(loss_of(expected).detach())
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert torch.allclose(found[key], gradient, atol=1e-6), key
    assert "torch.ops.aten" in forward.code


class _Scaled(nn.Module):
    """A layer times an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * self.scale
        return found


def test_an_attribute_that_changes_in_each_step_leaves_a_warning() -> None:
    model, x = _Scaled(), torch.randn(2, 4)
    own = copy.deepcopy(model)

    def work(group: Any) -> int:
        forward = attached(own, group)
        for step in range(12):
            own.scale = model.scale = float(step)
            assert torch.equal(own(x), model(x))
        return len(forward._passes)

    with pytest.warns(
        UserWarning, match="captured 9 times for calls of the same shapes, since scale changes"
    ):
        (kept,) = simulate(1, work, CPU)
    assert kept <= 9


def test_any_number_of_samples_fits_and_other_lengths_are_captured_anew() -> None:
    model, _ = network("llama")
    own = copy.deepcopy(model)

    def work(group: Any) -> tuple[list[float], int]:
        forward = attached(own, group)
        losses = []
        for rows, tokens in ((4, 8), (6, 8), (2, 5)):
            ids = torch.arange(rows * tokens).view(rows, tokens) % 60
            losses.append(float(own.eval()(input_ids=ids, labels=ids.clone()).loss.detach()))
        return losses, len(forward.code.split("# between blocks"))

    ((losses, _),) = simulate(1, work, CPU)
    for (rows, tokens), loss in zip(((4, 8), (6, 8), (2, 5)), losses, strict=True):
        ids = torch.arange(rows * tokens).view(rows, tokens) % 60
        assert loss == pytest.approx(float(model.eval()(input_ids=ids, labels=ids).loss.detach()), abs=1e-6)


def test_training_and_evaluation_are_captured_apart() -> None:
    model, batch = network("by_hand")
    own = copy.deepcopy(model)

    def work(group: Any) -> tuple[float, float]:
        attached(own, group)
        trained = float(own.train()(**batch)[0].detach())
        return trained, float(own.eval()(**batch)[0].detach())

    ((trained, evaluated),) = simulate(1, work, CPU)
    assert evaluated == float(model.eval()(**batch)[0].detach())
    assert trained != evaluated


def test_one_tensor_given_twice_stays_two_inputs() -> None:
    """As labels that are the tokens: later batches may tell them apart."""
    model, batch = network("llama")
    captured = capture(model, (), {**batch, "labels": batch["input_ids"]}, device=CPU)
    inputs = [node for node, origin in captured.origins.items() if origin.kind == "input"]
    assert [len(node.users) > 0 for node in inputs] == [True, True]


class Deciding(nn.Module):
    """Takes one way or another by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line
            return self.layer(x)
        return x


def test_decisions_by_values_are_refused_with_the_line() -> None:
    with pytest.raises(
        InputError, match=r"decides by the values of tensors at .*test_capture.py, line \d+: if x.sum"
    ):
        capture(Deciding(), (torch.randn(2, 4),), {}, device=CPU)


@dataclasses.dataclass
class Result:
    """A result as users write one."""

    value: torch.Tensor
    name: str


class InPlace(nn.Module):
    """Writes to tensors: one that nobody else sees, a view of another, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Result:
        self.calls += 1
        y = self.layer(x)
        y += 1
        z = y * 2
        z[:, 0] = 0
        return Result(z, "in place")


def test_writes_stay_what_they_are() -> None:
    model, x = InPlace(), torch.randn(4, 4)
    own = copy.deepcopy(model)

    def work(group: Any) -> Result:
        attached(own, group)
        found: Result = own(x)
        return found

    (found,) = simulate(1, work, CPU)
    assert found.name == "in place"
    assert torch.equal(found.value, model(x).value)
    assert float(own.calls) == 1.0
    graph = OperatorGraph(capture(model, (x,), {}, device=CPU))
    pinned = {one.name for one in graph.operators if one.pinned}
    assert {"mul", "fill_"} <= pinned
    assert "add" not in pinned


def test_keys_name_blocks_alike_and_tell_other_kinds_apart() -> None:
    model, batch = network("t5")
    graph = capture_shallow(model, (), batch, device=CPU).graph
    assert len(graph.by_key["decoder.block.*~1.layer.0.SelfAttention.q/linear#0"]) == 1
    model, batch = network("llama", rows=2)
    graph = capture_shallow(model, (), batch, device=CPU).graph
    (first, second) = graph.by_key["model.layers.*.mlp.down_proj/linear#0"]
    assert (first.path, second.path) == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert first.source.startswith("modeling_llama.py:")


def test_depth_does_not_change_the_shallow_graph() -> None:
    from tests.operators.networks import llama

    _, batch = network("llama")
    few, many = (capture_shallow(llama(num_hidden_layers=n), (), batch, device=CPU) for n in (4, 40))
    assert few.graph.by_key.keys() == many.graph.by_key.keys()
    counts = [many.graph.count(number) for number, one in enumerate(many.graph.segments) if one.path]
    assert sum(counts) == 40
    assert many.copy_name("model.layers.39.mlp.up_proj.weight") == "model.layers.2.mlp.up_proj.weight"


def test_inputs_that_differ_do_not_fit() -> None:
    model, batch = network("llama")
    captured = capture(model, (), batch, device=CPU)
    assert captured.fits(*flat_arguments((), batch))
    assert not captured.fits(*flat_arguments((), {**batch, "labels": batch["labels"][:2]}))
    assert not captured.fits(*flat_arguments((), {"input_ids": batch["input_ids"]}))
