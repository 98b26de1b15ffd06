"""Weight gradients that are computed after the rest of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.pytorch_utils import Conv1D

from atorch_ns.pipeline.run.weight_gradients import WeightGradients, linear_layers

WIDTH = 8


class Layers(nn.Module):
    """Layers as models have them, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv1d, self.tied = Conv1D(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.conv1d.weight
        self.product = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.num_calls = 0

    def block(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = x + self.second(input=F.relu(self.first(self.norm(x)), inplace=True))
        found = self.conv1d(x)
        found += self.frozen(input=x)
        found = found @ self.product
        found, _ = self.attention(found, found, found, need_weights=False)
        return self.tied(found) + F.linear(found, self.second.weight.T[:WIDTH])  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class Recomputed(Layers):
    """The same, recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


class Reentrant(Layers):
    """The same, recomputed by torch's older way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=True)  # type: ignore[no-any-return]


class Selective(Layers):
    """The same, some operators recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=kept)  # type: ignore[no-any-return]


def _policy(_: object, operator: object, *__: object, **___: object) -> CheckpointPolicy:
    keeps = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class Penalty(Layers):
    """A model that differentiates itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach().requires_grad_()
        out = self.first(torch.tanh(given))
        (kept,) = torch.autograd.grad(out.sum(), given, retain_graph=True)
        (slope,) = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return self.second(out) + slope.square() + kept + x


def _autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("context", [nullcontext, _autocast])
@pytest.mark.parametrize("kind", [Layers, Recomputed, Reentrant, Selective, Penalty])
def test_both_parts_give_the_gradients_of_the_whole(
    kind: type[Layers], context: Callable[[], AbstractContextManager[object]]
) -> None:
    torch.manual_seed(0)
    model, (x, given) = kind(), torch.randn(2, 3, 5, WIDTH)

    def results(later: WeightGradients | None, *, rounds: int) -> tuple[dict[str, torch.Tensor], int]:
        model.zero_grad()
        value = x.clone().requires_grad_()
        model.num_calls = 0
        for _ in range(rounds):
            with context(), later or nullcontext():
                out = model(value)
            if later is None:
                out.backward(given.to(out.dtype))
                continue
            edges = [get_gradient_edge(out)]
            del out
            later.backward(edges, [given.to(torch.float32 if context is nullcontext else torch.bfloat16)])
            before = None if model.first.weight.grad is None else model.first.weight.grad.clone()
            later.add()
            assert before is None or not torch.equal(before, model.first.weight.grad)  # type: ignore[arg-type]
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert value.grad is not None
        return {name: one.clone() for name, one in {**found, "x": value.grad}.items()}, model.num_calls

    for rounds in (1, 2):
        wanted, calls = results(None, rounds=rounds)
        found, calls_found = results(WeightGradients(linear_layers(model)), rounds=rounds)
        assert calls_found == calls
        assert set(found) == set(wanted)
        for name, one in wanted.items():
            assert found[name].dtype == one.dtype
            tolerance = 1e-5 if context is nullcontext else 2e-2
            assert (found[name] - one).abs().max() <= tolerance * one.abs().max(), name


def test_what_watches_its_gradient_is_not_left_for_later() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    model(x).sum().backward()
    wanted = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    later = WeightGradients(linear_layers(model))
    with later:
        out = model(x)
    later.backward([get_gradient_edge(out)], [torch.ones_like(out)])
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None
    assert "forward" not in vars(model[1])
    later.add()
    for one, expected in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(one.grad, expected)


def test_tensors_that_do_not_go_together_are_refused_as_by_torch() -> None:
    model = nn.Linear(4, 4)
    with WeightGradients(linear_layers(model)), pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(3, 4, dtype=torch.float64))
    model.bfloat16()
    with WeightGradients(linear_layers(model)), pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(3, 4))


class _Doubles(nn.Module):
    """A layer without a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


OWN_CONV1D = type("Conv1D", (_Doubles,), {})
"""A user's own class of that name."""


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_weights_that_are_computed_are_left_to_the_layer(wrap: Callable[..., nn.Module]) -> None:
    """Each reading of such a weight iterates once."""

    def trained(later: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(wrap(nn.Linear(4, 4)), OWN_CONV1D(), nn.Linear(4, 4))
        gradients = WeightGradients(linear_layers(model))
        with gradients if later else nullcontext():
            out = model(torch.ones(3, 4, requires_grad=True))
        if later:
            gradients.backward([get_gradient_edge(out)], [torch.ones_like(out)])
            gradients.add()
        else:
            out.sum().backward()
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {**dict(model.named_buffers()), **found}

    wanted, found = trained(False), trained(True)
    assert set(found) == set(wanted)
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one)
