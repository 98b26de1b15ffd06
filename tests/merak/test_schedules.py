"""Schedules of a pipeline, recomputation, overlapped reductions, and the wall clock breakdown."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

from atorch_ns.testing.workers import run_ranks
from tests.merak.parts import QUICK, Run, assert_equal_runs, run_each, run_merak, run_plain

MICRO_BATCHES = 4
SCHEDULES = (
    "1f1b",
    "ds_default",
    "pre_recompute_1f1b",
    "last_no_recompute_1f1b",
    "shifted_critical_path",
    "gpipe",
    "interleaved_1f1b",
    "zb1p",
    "auto",
)


@functools.cache
def plain() -> Run:
    """Two steps in one process."""
    (found,) = run_ranks(functools.partial(run_plain, "gpt2", MICRO_BATCHES, **QUICK), 1, timeout_s=100)
    return found


def passes(trainer: Any) -> list[tuple[str, int, int]]:
    """The passes of this rank's last step: kind, stage and micro-batch."""
    return [
        (one.action.kind, one.action.stage, one.action.micro_batch)
        for one in trainer.result.train_step.timeline
    ]


def _runs(degrees: dict[str, int], given: dict[str, dict[str, Any]]) -> dict[str, Run]:
    runs = {
        key: {"accumulation": MICRO_BATCHES, "look": passes, **QUICK, **fields}
        for key, fields in given.items()
    }
    return run_each(functools.partial(run_merak, "gpt2", degrees), runs)


@pytest.mark.timeout(300)
def test_every_schedule_trains_as_one_process() -> None:
    given = {name: {"train_schedule": name} for name in SCHEDULES}
    ranks = run_ranks(_runs, 2, args=({"pp": 2}, given), timeout_s=250)
    for run in ranks[0].values():
        assert_equal_runs(run, plain())
    first, last = ranks[0], ranks[1]
    assert first["1f1b"].seen == first["ds_default"].seen
    forward_first = [kind for kind, _, _ in first["gpipe"].seen if kind in "FB"]
    assert forward_first == ["F"] * MICRO_BATCHES + ["B"] * MICRO_BATCHES
    one_by_one = [kind for kind, _, _ in last["1f1b"].seen if kind in "FB"]
    assert one_by_one == ["F", "B"] * MICRO_BATCHES
    assert {stage for _, stage, _ in first["interleaved_1f1b"].seen} == {0, 2}
    assert "W" in {kind for kind, _, _ in first["zb1p"].seen}
    recomputed = {name: {kind for kind, _, _ in run.seen} for name, run in first.items()}
    assert "R" not in recomputed["1f1b"]  # inside of backward passes
    assert "R" in recomputed["pre_recompute_1f1b"]
    assert "R" in recomputed["shifted_critical_path"]
    last_recomputes = {name for name, run in last.items() if "R" in {kind for kind, _, _ in run.seen}}
    assert "last_no_recompute_1f1b" not in last_recomputes


RECOMPUTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "usual": ({}, ["2 module(s) recomputed", "2 module(s) recomputed"]),
    "pairs": ({"checkpoint_num_layers": 2}, ["2 module(s) recomputed", "2 module(s) recomputed"]),
    # Merak's formula: the last stage recomputes nothing.
    "half": ({"activation_checkpoint_ratio": ["0.5"]}, ["1 module(s) recomputed", "0"]),
    "each": (
        {"activation_checkpoint_ratio": ["0.5", "1"]},
        ["1 module(s) recomputed", "2 module(s) recomputed"],
    ),
    "none": ({"activation_checkpointing": False}, ["", ""]),
    "no layers": ({"checkpoint_num_layers": 0}, ["", ""]),
}


@pytest.mark.timeout(200)
def test_blocks_are_recomputed_as_arguments_say() -> None:
    given = {name: fields for name, (fields, _) in RECOMPUTED.items()}
    ranks = run_ranks(_runs, 2, args=({"pp": 2}, given), timeout_s=150)
    for run in ranks[0].values():
        assert_equal_runs(run, plain())
    for rank, found in enumerate(ranks):
        for name, (_, said) in RECOMPUTED.items():
            row = found[name].rows.get("checkpoint", "")
            assert said[rank] in row, (name, rank, row)
            assert bool(said[rank]) == bool(row)


@pytest.mark.timeout(200)
def test_levels_of_overlap_train_as_none() -> None:
    given = {str(level): {"tp_overlapping_level": level} for level in (0, 1, 2, 3)}
    ranks = run_ranks(_runs, 2, args=({"tp": 2}, given), timeout_s=150)
    for run in ranks[0].values():
        assert_equal_runs(run, plain())
    for found in ranks:
        for level, run in found.items():
            row = run.rows["tensor_parallel"]
            assert ("layers reduce the first half of a batch" in row) == (level != "0"), level
            assert (f"tp_overlapping_level={level} is run as 1" in run.rows["notes"]) == (level in "23")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _clocked(degrees: dict[str, int], wall_clock_breakdown: bool) -> list[str]:
    kept = _Kept()
    logging.getLogger("atorch_ns").addHandler(kept)
    run_merak("gpt2", degrees, MICRO_BATCHES, wall_clock_breakdown=wall_clock_breakdown, **QUICK)
    return [text for text in kept.texts if "wall clock" in text]


@pytest.mark.timeout(100)
def test_the_wall_clock_of_each_rank_is_logged() -> None:
    first, other = run_ranks(_clocked, 2, args=({"pp": 2}, True), timeout_s=60)
    assert len(first) == 2  # once for each step that is logged
    assert other == []
    table = first[-1].splitlines()
    assert table[0] == "step 2, wall clock of each rank (measured):"
    for name in ("rank", "forward", "recompute", "backward", "waiting", "update"):
        assert name in table[1]
    assert [line.split()[0] for line in table if line.split()[:1] in (["0"], ["1"])] == ["0", "1"]


@pytest.mark.timeout(100)
def test_the_wall_clock_names_phases_without_a_pipeline() -> None:
    first, _ = run_ranks(_clocked, 2, args=({"dp": 2}, True), timeout_s=60)
    for name in ("forward_backward", "reduce", "update"):
        assert name in first[-1]
    assert run_ranks(_clocked, 2, args=({"dp": 2}, False), timeout_s=60) == [[], []]
