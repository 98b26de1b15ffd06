"""How new modules are made, and what they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.errors import RegistrationError
from tests.opt_lib.replacements.modules import (
    Child,
    FastBuilt,
    FastFromModule,
    FastLinear,
    FastSubclass,
    Model,
    Old,
    apply,
    output_and_gradients,
)


def _convert(old: nn.Module) -> nn.Module:
    assert isinstance(old, Old)
    return FastBuilt(old.size, old.bias is not None)


@pytest.mark.parametrize(
    ("target", "convert"),
    [(FastSubclass, None), (FastBuilt, None), (FastFromModule, None), (FastBuilt, _convert)],
    ids=["subclass", "constructor", "from_module", "convert"],
)
def test_weights_move_and_nothing_else_changes(
    register: Callable[..., Any], target: type[nn.Module], convert: Any
) -> None:
    register("fast", supported_dtypes={torch.float32}, pair_cls=(Old, target), convert=convert)
    model = Model()
    model.plain.eval()
    model.layers[0].weight.requires_grad_(False)
    x = torch.randn(3, 4)
    before = output_and_gradients(model, x)
    tensors = model.state_dict(keep_vars=True)
    rng = torch.get_rng_state()

    job, explained, warned = apply(model)

    assert torch.equal(torch.get_rng_state(), rng)
    assert job.module is model
    assert [type(part) for part in (model.first, model.plain, model.layers[0], model.layers[1][0])] == [
        target
    ] * 4
    assert type(model.second) is Child, "a subclass is another class"
    assert model.again is model.first
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert not model.plain.training
    assert model.first.training
    torch.testing.assert_close(output_and_gradients(model, x), before, rtol=1e-6, atol=1e-6)
    assert f"fast: 4 × Old → {target.__name__}" in explained
    assert not warned


def test_subclasses_are_replaced_on_demand(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastBuilt), include_subclasses=True)
    model = Model()
    _, explained, _ = apply(model)
    assert type(model.second) is FastBuilt
    assert "fast: 1 × Child → FastBuilt, 4 × Old → FastBuilt" in explained or (
        "fast: 4 × Old → FastBuilt, 1 × Child → FastBuilt" in explained
    )


def test_a_target_that_is_a_subclass_is_not_replaced_twice(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastSubclass), include_subclasses=True)
    model = Model()
    apply(model)
    first = model.first
    apply(model)
    assert model.first is first


def test_non_persistent_buffers_keep_their_values(register: Callable[..., Any]) -> None:
    class WithCache(FastBuilt):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.register_buffer("cache", torch.zeros(3), persistent=False)

    register("fast", pair_cls=(Old, WithCache))
    model = nn.Sequential(Old(4))
    cache = model[0].cache
    apply(model)
    assert model[0].cache is cache


def test_the_root_itself_is_replaced(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastBuilt))
    model = Old(4)
    job, _, _ = apply(model)
    assert type(job.model) is FastBuilt
    assert job.module is job.model
    assert job.model.weight is model.weight


def test_an_outer_module_of_the_class_keeps_its_replaced_inner_one(register: Callable[..., Any]) -> None:
    class Nest(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    class FastNest(Nest):
        pass

    register("fast", pair_cls=(Nest, FastNest))
    model = Nest(Nest(nn.Linear(2, 2)))
    weight = model.inner.inner.weight
    job, _, _ = apply(model)
    assert type(job.model) is type(job.model.inner) is FastNest
    assert job.model.inner.inner.weight is weight


def test_meta_models_stay_on_meta(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastBuilt))
    with torch.device("meta"):
        model = nn.Sequential(Old(4))
    weight = model[0].weight
    apply(model)
    assert type(model[0]) is FastBuilt
    assert model[0].weight is weight
    assert weight.is_meta


def _with_hook(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda *_: None)


def _with_own_forward(model: nn.Module) -> None:
    model[0].forward = model[0].forward


def _parametrized(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


@pytest.mark.parametrize(
    ("attach", "reason"),
    [(_with_hook, "hooks"), (_with_own_forward, "forward"), (_parametrized, "parametrized")],
)
def test_what_a_new_module_would_lose_keeps_the_old_one(
    register: Callable[..., Any], attach: Callable[[nn.Module], None], reason: str
) -> None:
    register("fast", pair_cls=(nn.Linear, FastLinear), include_subclasses=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    attach(model)
    kind = type(model[0])
    _, explained, _ = apply(model)
    assert type(model[0]) is kind
    assert type(model[1]) is FastLinear
    (row,) = [text for text in explained if text.startswith("fast:")]
    assert "1 × Linear → FastLinear" in row
    assert reason in row


class Renamed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size))


class Larger(FastBuilt):
    def __init__(self, size: int) -> None:
        super().__init__(size + 1)


class NeedsMore(FastBuilt):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__(size)


class Breaks(FastBuilt):
    def __init__(self, size: int) -> None:
        raise ValueError("no kernel for this size")


@pytest.mark.parametrize(
    ("target", "convert", "parts"),
    [
        (Renamed, None, ["lacks bias, scale, weight", "adds gain"]),
        (Larger, None, ["weight", "(5,)", "(4,)"]),
        (NeedsMore, None, ["num_heads", "from_module", "convert="]),
        (Breaks, None, ["no kernel for this size"]),
        (FastBuilt, lambda old: nn.Identity(), ["Identity", "FastBuilt"]),
        (FastBuilt, lambda old: None, ["NoneType"]),
    ],
)
def test_a_new_module_that_does_not_fit_is_refused(
    register: Callable[..., Any], target: type[nn.Module], convert: Any, parts: list[str]
) -> None:
    register("fast", pair_cls=(Old, target), convert=convert)
    with pytest.raises(RegistrationError, match="'fast', replacing Old") as caught:
        apply(nn.Sequential(Old(4)))
    assert all(part in str(caught.value) for part in parts)
