"""Blocks are compiled in models that are divided."""

from __future__ import annotations

from typing import Any

import pytest

from tests.opt_lib.scenarios import Runs, Scenario, assert_equals_one_process, named, run_scenarios, selected

COMPILE = ("compile", "aot_eager")


def _mesh(*axes: tuple[str, int]) -> Any:
    return ("parallel_mode", ([*axes], None))


def _by(schedule: str) -> Any:
    return ("pipeline_parallel", {"schedule": schedule})


TWO_RANKS = {
    "tensor": Scenario("tied_llama", [_mesh(("tensor", 2)), COMPILE]),
    "tensor, fused qkv": Scenario("hf_gpt2", [_mesh(("tensor", 2)), COMPILE]),
    "sequence": Scenario("tied_llama", [_mesh(("sequence", 2)), COMPILE]),
    "1F1B": Scenario("tied_llama", [_mesh(("pipeline", 2)), COMPILE, "checkpoint"]),
    "Interleaved1F1B": Scenario("tied_llama", [_mesh(("pipeline", 2)), COMPILE, _by("Interleaved1F1B")]),
}
# Schedules that compute gradients of inputs and of weights apart, where the stage can.
SPLIT = {
    schedule: Scenario("tied_llama", [_mesh(("pipeline", 2)), COMPILE, _by(schedule)])
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    return run_scenarios(selected(request, TWO_RANKS), 2)


@pytest.fixture(scope="module")
def split_runs(request: pytest.FixtureRequest) -> Runs:
    return run_scenarios(selected(request, SPLIT), 2)


@pytest.mark.parametrize("name", named(TWO_RANKS, often=("tensor, fused qkv",)))
def test_equals_one_process(name: str, runs: Runs) -> None:
    assert_equals_one_process(TWO_RANKS[name], name, runs)


@pytest.mark.parametrize("name", named(SPLIT, often=("ZBVZeroBubble",)))
def test_schedules_that_split_the_backward_pass_do_not_split_compiled_blocks(
    name: str, split_runs: Runs
) -> None:
    assert_equals_one_process(SPLIT[name], name, split_runs)
