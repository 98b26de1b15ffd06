"""Guards of random states, buffers and training modes, also where the block raises."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns.capture.random_states import (
    buffers_and_generators_kept,
    modes_kept,
    random_states_kept,
    save_generators,
)

CPU = torch.device("cpu")


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@random_states_kept(CPU)
def _draw_and_raise() -> None:
    _draw()
    raise ValueError("stop")


def test_a_block_that_draws_and_raises_changes_no_stream() -> None:
    with random_states_kept():
        expected = _draw()
        with pytest.raises(ValueError, match="stop"):
            _draw_and_raise()
    assert _draw() == expected


def test_saved_generators_draw_the_same_again() -> None:
    with random_states_kept():
        restore = save_generators(CPU)
        first = torch.rand(3)
        restore()
        assert torch.equal(torch.rand(3), first)


def test_buffers_are_restored_in_place_and_unchanged_ones_are_not_written() -> None:
    norm = nn.BatchNorm1d(2)
    running, version = norm.running_mean, norm.running_var._version  # type: ignore[union-attr]
    assert running is not None
    with buffers_and_generators_kept(norm, CPU):
        running.add_(1.0)
        norm.num_batches_tracked = torch.tensor(7)
    assert norm.running_mean is running
    assert torch.equal(running, torch.zeros(2))
    assert int(norm.num_batches_tracked) == 0
    assert norm.running_var._version == version  # type: ignore[union-attr]


def test_each_module_gets_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with modes_kept(model):
        model.eval()
        model[1].train()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
