"""Two answers to "what does tensor parallelism divide?" agree: the one that the search prices, and the one that runs.

The search prices what ``find_division`` sees in recorded operators; training divides what ``choose_plan`` finds in
layers. Rows of ``DIFFERENCES`` are known disagreements with their reasons; each says what is priced and stays whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.capture.nests import samples_and_tokens
from atorch_ns.data import call_model
from atorch_ns.profile.record.fake_steps import FakeSteps
from atorch_ns.profile.record.steps import StepPrecision, TracedModel
from atorch_ns.sharding import choose_plan, parameter_dims, trace_layers
from atorch_ns.testing.models import get_case
from tests.sharding.tensor.test_regions import BackToWidth, SizeByHeads
from tests.sharding.tensor_models import ATTENTIONS, Between, NormOverHeads, make, tokens
from tests.sharding.width_models import ScaledByWidth

Dims = dict[str, int]
"""The dimension of each divided parameter, by its first name."""

Run = Callable[[nn.Module, Any], Any]

CASES = ("mlp", "tied_llama", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit", "hf_mixtral", "encoder_decoder")

ATTENTION = frozenset(f"blocks.{block}.attention" for block in range(2))
DIFFERENCES: dict[str, tuple[Callable[[], nn.Module], int, frozenset[str], str]] = {
    "a vocabulary of 31": (
        lambda: make(vocab=31),
        31,
        frozenset({"embed", "head"}),
        "operators are followed without a degree, so sizes that it does not divide are priced as divided",
    ),
    "a weight used twice": (
        lambda: Between("a tied weight"),
        32,
        frozenset({"embed"}),
        "a vocabulary that code outside its layer uses too stays whole when it runs",
    ),
    "a size of heads from the width": (
        lambda: make(SizeByHeads),
        32,
        ATTENTION,
        "operators do not show that code reshapes by the width of all ranks, which fails on a part",
    ),
    "heads back to the width": (
        lambda: make(BackToWidth),
        32,
        ATTENTION,
        "operators do not show that code reshapes by the width of all ranks, which fails on a part",
    ),
}
"""By name: the model, its vocabulary, the modules that are priced as divided and run whole, and the reason."""

BY_NUMBERS = (NormOverHeads, ScaledByWidth)
"""Attention that runs divided and gives other results, which only the self-test's numbers show."""


def priced(model: nn.Module, batch: Any, loss: Run) -> Dims:
    """The dims by recorded operators."""
    blocks = {block.name: block.module for block in repeated_blocks(model)}
    sizes = samples_and_tokens(batch)
    subject = TracedModel(model, batch, loss, sizes, sizes, blocks, dict.fromkeys(blocks, ""))
    return dict(FakeSteps(subject, {}, "cpu").record(StepPrecision.parse("float32"), sizes).dims)


def divided(model: nn.Module, batch: Any, forward: Run, *, by_numbers: bool = False) -> Dims:
    """The dims of the plan that runs on two ranks, by shapes or by numbers."""
    graph = trace_layers(model, batch, forward)
    chosen = choose_plan(model, 2, graph, source="found", run_numerics=by_numbers, undivided="keep")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for path, layer in chosen.layout.layers.items():
        own = dict(model.get_submodule(path).named_parameters())
        for name, (dim, _) in parameter_dims(model.get_submodule(path), layer).items():
            if name in own:
                found[names[id(own[name])]] = dim
    return found


def _forward(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return _forward(model, batch).square().mean()


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tied", [False, True])
def test_decoders(attention: type[nn.Module], tied: bool) -> None:
    model = make(attention, tied=tied)
    dims = divided(model, tokens(), _forward)
    assert dims["blocks.1.attention.o.weight"] == 1
    assert priced(model, tokens(), _loss) == dims


@pytest.mark.parametrize("name", CASES)
def test_reference_models(name: str) -> None:
    case = get_case(name)
    model, batch = case.build(), case.make_batch(4, 0)

    def forward(model: nn.Module, batch: Any) -> Any:
        return call_model(model, batch, case.model_input_format)

    dims = divided(model, batch, forward)
    assert dims
    assert priced(model, batch, lambda model, batch: case.loss_func(batch, forward(model, batch))) == dims


@pytest.mark.parametrize("name", DIFFERENCES)
def test_known_differences(name: str) -> None:
    build, vocab, modules, reason = DIFFERENCES[name]
    model = build()
    found, dims = priced(model, tokens(vocab), _loss), divided(model, tokens(vocab), _forward)
    assert dims.items() <= found.items(), "nothing runs divided that is priced whole"
    extra = found.keys() - dims.keys()
    assert all(any(parameter.startswith(f"{path}.") for path in modules) for parameter in extra), reason
    assert all(any(parameter.startswith(f"{path}.") for parameter in extra) for path in modules), reason


def test_what_only_numbers_show_is_priced_as_divided() -> None:
    for attention in BY_NUMBERS:
        dims = divided(make(attention), tokens(), _forward, by_numbers=True)
        found = priced(make(attention), tokens(), _loss)
        assert dims.items() < found.items(), attention
        assert all(name.startswith(tuple(ATTENTION)) for name in found.keys() - dims.keys()), attention
