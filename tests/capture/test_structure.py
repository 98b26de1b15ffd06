"""A few blocks stand for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.capture.blocks import fingerprints, repeated_blocks
from atorch_ns.capture.structure import truncate
from atorch_ns.profile import profile_model
from atorch_ns.profile.record.fake_steps import FakeSteps
from atorch_ns.profile.record.steps import StepPrecision
from atorch_ns.sharding import find_dims
from atorch_ns.testing.networks import TiedLlama
from tests.profile.subjects import Stack, attempts, differences, square, subject_of


def _next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def _gemma(depth: int) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=depth,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=64,
            sliding_window=8,
        )
    )


@pytest.mark.parametrize("kind", ["equal", "alternating"])
def test_shortened_is_whole(kind: str) -> None:
    tolerance = 1e-9
    if kind == "equal":
        model: nn.Module = TiedLlama(num_layers=7)
        forward_loss: Any = _next_token
        batch: Any = torch.randint(64, (4, 16))
    else:
        # Sliding and full attention; the model's output holds a cache of keys and values, for which it makes a
        # counter of 8 bytes for each layer before the first. The output is held: where it is not, what follows
        # the blocks frees the cache of all, which a few cannot stand for.
        tolerance = 0.02
        model = _gemma(12)
        forward_loss = lambda model, batch: model(**batch).loss  # noqa: E731
        tokens = torch.randint(64, (4, 16))
        batch = {"input_ids": tokens, "labels": tokens}
    own = attempts(model, batch, forward_loss, ["float32", "float32/bfloat16"], keeps_output=True)
    num_tokens = 16
    short, whole = (own._trace_fake_steps(truncated, 101, (num_tokens,)) for truncated in (True, False))
    assert differences(short.segments, whole.segments, at=(1, 4, 64), tolerance=tolerance) == []
    assert [s.paths for s in short.segments] == [s.paths for s in whole.segments]
    incoming = [
        [segment.costs["float32"].incoming.at(4) for segment in traced.segments] for traced in (short, whole)
    ]
    assert incoming[0] == incoming[1]


def test_kept_blocks() -> None:
    model = Stack(depth=9)
    model.layers[4] = nn.Linear(8, 8, bias=False)
    blocks = {block.name: block.module for block in repeated_blocks(model)}
    container = truncate(model, blocks, fingerprints(blocks))["layers"]
    assert container.kept == (0, 1, 4, 8)
    assert container.stands_for == (0, 1, 1, 1, 2, 1, 1, 1, 3)


def test_shapes_that_change_between_equal_blocks_are_not_shortened() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.MaxPool1d(2)) for _ in range(5)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    trace = profile_model(Halving(), torch.randn(2, 4, 64), square, find_dims).trace
    assert trace is not None
    blocks = [segment for segment in trace.segments if segment.is_block]
    flops = [segment.costs["float32"].forward.flops.at(2) for segment in blocks]
    assert flops == [2 * 4 * 4 * 3 * 2 * 64 / 2**index for index in range(5)]


def test_cost_of_tracing_is_constant_in_depth() -> None:
    events = []
    for depth in (5, 50):
        model = Stack(depth)
        subject = subject_of(model, torch.randn(2, 8), square)
        containers = truncate(model, subject.blocks, subject.fingerprints)
        step = FakeSteps(subject, containers, "cpu").record(StepPrecision.parse("float32"), (101, 1))
        events.append(len(step.recording.kinds))
    assert events[0] == events[1]


def test_settings_by_layer_are_shortened_with_the_layers() -> None:
    class ByLayer(Stack):
        def __init__(self) -> None:
            super().__init__(6)
            self.rates = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, rate in zip(self.layers, self.rates, strict=True):
                x = layer(x) * rate
            return x

    model = ByLayer()
    trace = profile_model(model, torch.randn(2, 8), square, find_dims).trace
    assert trace is not None
    assert sum(segment.count for segment in trace.segments if segment.is_block) == 6
    assert model.rates == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
