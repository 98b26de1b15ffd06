"""Runs of MerakTrainer on ranks of every kind, each held against transformers' Trainer in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from atorch_ns.testing.workers import run_ranks
from tests.merak.parts import NAMES, assert_equal_runs, run_merak, run_plain

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2 pp2": {"dp": 2, "pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "pp4": {"pp": 4},
    "dp2 tp2 pp2": {"dp": 2, "tp": 2, "pp": 2},
}
MICRO_BATCHES = 8
"""Of a step over all data ranks."""


@functools.cache
def plain(name: str) -> Any:
    """Eight micro-batches a step in one process."""
    (found,) = run_ranks(run_plain, 1, args=(name, MICRO_BATCHES), timeout_s=100)
    return found


def check(name: str, layout: str, **fields: Any) -> Any:
    """Trains on ranks, and compares logs and weights."""
    degrees = LAYOUTS[layout]
    ranks = 1
    for size in degrees.values():
        ranks *= size
    accumulation = MICRO_BATCHES // degrees.get("dp", 1)
    every = run_ranks(
        functools.partial(run_merak, **fields), ranks, args=(name, degrees, accumulation), timeout_s=200
    )
    assert all(found[0] == every[0][0] for found in every)  # the same logs on all ranks
    assert_equal_runs(every[0], plain(name))
    return every[0][2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", "dp2 tp2 pp2"),
        ("llama", "tp2 pp2"),
        ("opt", "pp2"),
        ("bert", "dp2 pp2"),
        ("t5", "dp2 pp2"),
        ("vit", "dp2 tp2"),
    ],
)
def test_a_model_trains_as_in_one_process(name: str, layout: str) -> None:
    rows = check(name, layout)
    assert "checkpoint" in rows  # recomputation is on by default
    assert ("pipeline_parallel" in rows) == ("pp" in layout)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_model_trains_on_every_layout(name: str, layout: str) -> None:
    check(name, layout)
