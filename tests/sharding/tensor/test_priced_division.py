"""What tensor parallelism divides is decided once: the search prices the plan that runs.

The finder of ``sharding`` decides, for a profile by shapes alone. Only what numbers show is priced as divided and
runs whole (``BY_NUMBERS``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.data import call_model
from atorch_ns.profile import Divide, ParameterDims, profile_model
from atorch_ns.profile.record.steps import ForwardLoss
from atorch_ns.sharding import find_dims
from atorch_ns.testing.models import get_case
from tests.sharding.tensor.test_regions import BackToWidth, SizeByHeads
from tests.sharding.tensor_models import ATTENTIONS, Between, Decoder, NormOverHeads, WithNorms, make, tokens
from tests.sharding.width_models import ScaledByWidth

Dims = dict[str, int]
"""The dimension of each divided parameter, by its first name."""

Run = Callable[[nn.Module, Any], Any]

ATTENTION = tuple(f"blocks.{block}.attention" for block in range(2))

CASES = ("mlp", "tied_llama", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit", "hf_mixtral", "encoder_decoder")

WHOLE: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, ...]]] = {
    "a vocabulary of 31": (lambda: make(vocab=31), 31, ("embed", "head")),
    "a weight used twice": (lambda: Between("a tied weight"), 32, ("embed",)),
    "a size of heads from the width": (lambda: make(SizeByHeads), 32, ATTENTION),
    "heads back to the width": (lambda: make(BackToWidth), 32, ATTENTION),
}
"""By name: the model, its vocabulary, and the modules that stay whole, which recorded operators do not show."""

BY_NUMBERS = (NormOverHeads, ScaledByWidth)
"""Attention that runs divided and gives other results, which only the self-test's numbers show."""


def priced(model: nn.Module, batch: Any, loss: ForwardLoss) -> Dims:
    """The dims in a profile."""
    trace = profile_model(model, batch, loss, find_dims, precisions=["float32"]).trace
    assert trace is not None
    dims = {}
    for segment in trace.segments:
        for prefix in [f"{path}." for path in segment.paths] or [""]:
            for spec in segment.parameters:
                if spec.tensor_dim is not None and spec.tied_to is None:
                    dims[prefix + spec.name] = spec.tensor_dim
    return dims


def divided(model: nn.Module, batch: Any, forward: Run) -> Dims:
    """The dims of the plan that runs, which numbers decide too."""
    return dict(find_dims(model, batch, forward, run_numerics=True).dims)


class TwoOutputs(nn.Module):
    """Returns what flows between the layers of its first pair, so that this pair stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.first[0](x).relu()
        return self.second(self.first[2](inner)), inner


OTHERS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "no blocks": lambda: (nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 12)), torch.randn(4, 16)),
    "fused attention of torch": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3),
        torch.randn(4, 8, 32),
    ),
}
"""Models whose biases, or layers outside blocks, recorded operators do not show as divided."""


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


@pytest.mark.parametrize("name", WHOLE)
def test_what_runs_whole_is_priced_whole(name: str) -> None:
    build, vocab, modules = WHOLE[name]
    model = build()
    dims = divided(model, tokens(vocab), _forward)
    assert dims
    assert not any(parameter.startswith(tuple(f"{path}." for path in modules)) for parameter in dims)
    assert priced(model, tokens(vocab), _loss) == dims


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name: str) -> None:
    model, batch = OTHERS[name]()
    dims = divided(model, batch, _forward)
    assert dims
    assert priced(model, batch, _loss) == dims


def test_a_model_that_divides_nowhere() -> None:
    assert priced(nn.Sequential(nn.Linear(8, 4)), torch.randn(2, 8), _loss) == {}


def test_outputs_that_the_loss_does_not_read() -> None:
    model = TwoOutputs()
    dims = divided(model, torch.randn(2, 8), _forward)
    assert dims.keys() == {f"second.{name}" for name in ("0.weight", "0.bias", "2.weight")}
    assert priced(model, torch.randn(2, 8), lambda model, batch: model(batch)[0].square().mean()) == dims


class GateOutside(Decoder):
    """Uses a block's gate outside the block as well, whose gradient ranks cannot sum."""

    def __init__(self) -> None:
        super().__init__(WithNorms)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(tokens) * self.blocks[0].attention.gate.sum()  # type: ignore[union-attr]
        return out


def _fail(*_: object) -> ParameterDims:
    raise ValueError("no way to follow it")


@pytest.mark.parametrize(
    ("model", "divide", "reason"),
    [
        (make(), _fail, "ValueError: no way to follow it"),
        (make(), lambda *_: ParameterDims({"nowhere": 0}), "KeyError: 'nowhere'"),
        (
            GateOutside(),
            find_dims,
            "InputError: tensor_parallel cannot sum the gradient of blocks.0.attention.gate",
        ),
    ],
    ids=["the model fails", "a name is unknown", "training refuses it"],
)
def test_a_division_that_cannot_be_followed(
    model: nn.Module, divide: Divide, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "atorch_ns.profile"):
        trace = profile_model(model, tokens(), _loss, divide, precisions=["float32"]).trace
    assert trace is not None
    assert trace.how == "fake"
    assert trace.notes[0].startswith(f"Tensor parallelism is taken to divide nothing: {reason}")
    assert "Traceback" in caplog.text
    assert not any(segment.num_columns or segment.num_rows for segment in trace.segments)


def test_what_only_numbers_show_is_priced_as_divided() -> None:
    for attention in BY_NUMBERS:
        dims = divided(make(attention), tokens(), _forward)
        found = priced(make(attention), tokens(), _loss)
        assert dims.items() < found.items(), attention
        assert all(name.startswith(ATTENTION) for name in found.keys() - dims.keys()), attention
