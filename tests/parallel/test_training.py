"""Modules of all policies train as one process does, end to end: losses, norms, parameters and optimizer states."""

from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.testing.workers import run_ranks
from tests.parallel.training import check, trained

STAGES = {"pipeline_nmicros": 4}
HALVES = {**STAGES, "pipeline_nstages": 2}

TWO = {
    "dp": ("dp", 1, {}, {}),
    "dp, zero": ("dp", 1, {}, {"use_zero": True}),
    "tp": ("tp", 2, {"seed": 3}, {}),
    "data": ("data", 2, {}, {}),
    "pp": ("pp", 2, STAGES, {}),
    "pp, gpipe": ("pp", 2, {**STAGES, "pipeline_scheduler": "gpipe"}, {}),
    "autodist": ("autodist", 2, {"mem_constraint": 1.0}, {}),
}
FOUR = {
    "tp, zero": ("tp", 2, {}, {"use_zero": True}),
    "tp, zero in two groups": ("tp", 1, {}, {"use_zero": True, "zero_ngroups": 2}),
    "hybrid": ("hybrid", 4, HALVES, {}),
    "hybrid, zero": ("hybrid", 2, HALVES, {"use_zero": True}),
    "autodist, stages": ("autodist", 4, HALVES, {}),
}


def runs_of(name: str, case: tuple[str, int, dict[str, Any], dict[str, Any]]) -> Any:
    policy, plan, settings, fields = case
    return trained(name, policy, plan, settings, **fields)


@pytest.mark.parametrize("what", TWO)
def test_the_example_on_two_ranks(what: str) -> None:
    check("mlp", run_ranks(runs_of, 2, args=("mlp", TWO[what])), TWO[what][1], 1e-6)


@pytest.mark.parametrize("what", FOUR)
def test_the_example_on_four_ranks(what: str) -> None:
    check("mlp", run_ranks(runs_of, 4, args=("mlp", FOUR[what])), FOUR[what][1], 1e-6)


@pytest.mark.parametrize("what", ["tp", "pp", "autodist"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_on_two_ranks(name: str, what: str) -> None:
    check(name, run_ranks(runs_of, 2, args=(name, TWO[what]), timeout_s=120), TWO[what][1], 1e-5)


def test_tied_weights_of_divided_stages() -> None:
    check("gpt2", run_ranks(runs_of, 4, args=("gpt2", FOUR["hybrid"]), timeout_s=120), 4, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("what", [*TWO, *FOUR])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_transformers_by_all_policies(name: str, what: str) -> None:
    case, ranks = (TWO | FOUR)[what], 2 if what in TWO else 4
    check(name, run_ranks(runs_of, ranks, args=(name, case), timeout_s=300), case[1], 1e-5)
