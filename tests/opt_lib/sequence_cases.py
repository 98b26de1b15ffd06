"""Strategies and cases for the tests of sequence_parallel."""

from __future__ import annotations

import dataclasses
from typing import Any

from atorch_ns.testing import Case, get_case, map_tensors
from atorch_ns.testing.parity import (
    Trajectory,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import run_ranks

KINDS = ("ulysses", "ring")


def strategy(kind: str, *others: Any, sequence: int = 2, data: int = 1, **config: Any) -> list[Any]:
    axes = [("sequence", sequence), ("data", data)]
    return [("parallel_mode", (axes, None)), ("sequence_parallel", {"kind": kind, **config}), *others]


def cut(name: str, length: int) -> Case:
    """A case whose samples have ``length`` tokens."""
    case = get_case(name)

    def make_batch(batch_size: int, seed: int) -> Any:
        batch = case.make_batch(batch_size, seed)
        return map_tensors(lambda tensor: tensor[:, :length].contiguous(), batch)

    return dataclasses.replace(case, name=f"{name} of {length}", make_batch=make_batch)


def padded(name: str) -> Case:
    """A case whose samples begin with padding of several lengths."""
    case = get_case(name)

    def make_batch(batch_size: int, seed: int) -> Any:
        batch = case.make_batch(batch_size, seed)
        mask = batch["attention_mask"].clone()
        for row in range(batch_size):
            mask[row, : row % 4] = 0
        return {**batch, "attention_mask": mask}

    return dataclasses.replace(case, name=f"{name} padded", make_batch=make_batch)


def train(runs: list[tuple[Case, Any]], arguments: dict[str, Any]) -> list[Trajectory]:
    """What each case does under its strategy."""
    return [accelerated_run(case, steps, **arguments) for case, steps in runs]


def check(num_ranks: int, runs: list[tuple[Case, Any]], *, timeout_s: float = 100) -> None:
    """Every run is that of one process."""
    references = {case.name: reference_run(case) for case, _ in runs}
    found = run_ranks(train, num_ranks, args=(runs, {}), timeout_s=timeout_s)
    for place, (case, _) in enumerate(runs):
        assert_ranks_agree([trajectories[place] for trajectories in found])
        assert_parity(compare(references[case.name], found[0][place]))
