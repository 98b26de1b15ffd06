"""Records of a script's updates, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atorch_ns.numerics.script import compare_runs

NAN, INF = float("nan"), float("inf")


def _record(folder: Path, run: str, values: list[Any], *, step: int = 1, rank: int = 0) -> None:
    (folder / run).mkdir(exist_ok=True)
    torch.save(
        {"where": "train.py:1: step()", "tensors": {("weight", "w"): torch.as_tensor(values)}, "boxes": {}},
        folder / run / f"{step}-0-{step}-{rank}.pt",
    )


def _records(folder: Path, plain: list[Any], found: list[Any], rounded: list[Any]) -> None:
    for run, values in (("one", plain), ("ranks", found), ("rounding", rounded)):
        _record(folder, run, [0.0] * len(values), step=0)
        _record(folder, run, values)


@pytest.mark.parametrize(
    ("plain", "found", "rounded", "passes"),
    [
        ([1.0, 2.0], [1.0, 2.0003], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.001], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, 2.001], [1.0, 2.0005], True),  # rounding alone leads as far
        ([1.0, NAN], [1.0, NAN], [1.0, NAN], True),
        ([1.0, INF], [1.0, INF], [1.0, INF], True),
        ([1.0, NAN], [1.0, 2.0], [1.0, NAN], False),
        ([1.0, 2.0], [1.0, NAN], [1.0, 2.0], False),
        ([1.0, INF], [1.0, 2.0], [1.0, INF], False),
        ([1.0, NAN], [1.5, NAN], [1.0, NAN], False),
    ],
)
def test_what_is_more_than_rounding(
    plain: list[float], found: list[float], rounded: list[float], passes: bool, tmp_path: Path
) -> None:
    _records(tmp_path, plain, found, rounded)
    difference, largest = compare_runs(tmp_path, 1, reduced=False)
    assert (difference is None) is passes
    assert [row.step for row in largest] == [0, 1]


def test_weights_of_16_bits_are_rounded_from_the_first_record_on(tmp_path: Path) -> None:
    for run, values in (
        ("one", [1.001]),
        ("ranks", torch.tensor([1.001], dtype=torch.bfloat16)),
        ("rounding", [1.001]),
    ):
        _record(tmp_path, run, values, step=0)
        _record(tmp_path, run, values)
    assert compare_runs(tmp_path, 1, reduced=True)[0] is None


def test_imaginary_parts_count(tmp_path: Path) -> None:
    _records(tmp_path, [1.0, 2j], [1.0, 2.001j], [1.0, 2j])
    difference, _ = compare_runs(tmp_path, 1, reduced=False)
    assert difference is not None
    assert difference.error == pytest.approx(1e-3, rel=1e-3)


def test_a_rank_without_a_record_did_not_take_the_step(tmp_path: Path) -> None:
    _records(tmp_path, [1.0], [1.0], [1.0])
    _record(tmp_path, "ranks", [0.0], step=0, rank=1)
    difference, _ = compare_runs(tmp_path, 2, reduced=False)
    assert difference is not None
    assert (difference.kind, difference.name, difference.step) == ("steps", "rank 1", 1)
