"""Blocks measured alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.profile import Profile, ProfileDatabase, measure_blocks, profile_model
from atorch_ns.sharding import find_dims
from tests.profile.subjects import Stack, case_inputs, square


class Slow(nn.Module):
    """Sleeps in real forward passes; fake ones have no time to lose."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            Slow.calls += 1
            time.sleep(0.05)
        return self.linear(x)


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slow() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_one_instance_is_measured_and_found_again(tmp_path: Path) -> None:
    model, batch = Sleepy(), torch.randn(4, 8)
    profile = profile_model(model, batch, square, find_dims, precisions=["float32"])
    assert profile.trace is not None
    database = ProfileDatabase(tmp_path / "times.json")
    Slow.calls = 0

    def measure(**options: Any) -> dict[str, float]:
        trace = measure_blocks(model, batch, square, profile, device="cpu", database=database, **options)
        assert trace.timed_on
        return dict(trace.seconds)

    seconds = measure()
    print_of = next(segment.fingerprint for segment in profile.trace.segments if segment.is_block)
    assert set(seconds) == {f"{print_of}:float32:forward", f"{print_of}:float32:backward"}
    assert 0.05 <= seconds[f"{print_of}:float32:forward"] < 0.5
    calls = Slow.calls
    assert 4 <= calls <= 30
    assert measure() == seconds
    assert Slow.calls == calls
    measure(re_profile=True)
    assert Slow.calls > calls


def test_model_with_masks_positions_and_a_cache() -> None:
    model, batch, forward_loss = case_inputs("hf_llama", 2)
    model.config.use_cache = True
    profile = profile_model(model, batch, forward_loss, find_dims, precisions=["float32", "bfloat16"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace = measure_blocks(model, batch, forward_loss, profile, device="cpu")
    assert trace.notes == ()
    assert len(trace.seconds) == 4
    assert all(value > 0 for value in trace.seconds.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_block_that_cannot_stand_alone_is_a_note() -> None:
    class Needy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:
                raise RuntimeError("where is my model?")
            return super().forward(x)

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Needy(8, 8) for _ in range(4))

    model, batch = Model(), torch.randn(4, 8)
    profile = profile_model(model, batch, square, find_dims, precisions=["float32"])
    trace = measure_blocks(model, batch, square, profile, device="cpu")
    assert trace.seconds == {}
    assert "layers.0 could not be measured alone in float32: RuntimeError: where is my model?" in trace.notes


def test_profile_without_a_trace() -> None:
    with pytest.raises(InputError, match="profile_model"):
        measure_blocks(Stack(), torch.randn(4, 8), square, Profile.of(Stack()), device="cpu")
