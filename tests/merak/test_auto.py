"""Degrees that are searched for."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atorch_ns.errors import InputError
from atorch_ns.merak import MerakArguments, MerakTrainer, init, mpu
from atorch_ns.merak.auto import _unwanted_meshes
from atorch_ns.strategy import Strategy
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.merak.parts import QUICK, Data, arguments, logs_of, model


def _meshes_left(asked: dict[str, Any], world_size: int) -> int:
    return len(list(_unwanted_meshes(asked, world_size)))


def test_meshes_that_are_left_out() -> None:
    # Of the meshes of six axes over two ranks only the one that divides experts is left out.
    assert _meshes_left({}, 2) == 1
    assert _meshes_left({"tp": 2, "pp": "auto"}, 2) == 5
    assert _meshes_left({"dp": 2}, 2) == 4  # the axes data and zero both see different data
    for _, config in _unwanted_meshes({"tp": 2}, 4):
        axes = dict(config["axes"])
        assert axes.get("tensor", 1) != 2 or "expert" in axes
    with pytest.raises(InputError, match="tp=3 do not fit any mesh of 4"):
        list(_unwanted_meshes({"tp": 3}, 4))


def _trained(folder: str, degrees: dict[str, Any], **fields: Any) -> dict[str, Any]:
    init(**degrees)
    given = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, **QUICK, **fields}
    args = MerakArguments(**arguments(folder, **given))
    trainer = MerakTrainer(model("gpt2"), args, train_dataset=Data("gpt2"))
    trainer.train()
    grid = mpu.get_grid()
    data = grid.get_dim("data")
    return {
        "sizes": grid.sizes,
        "batch": args.per_device_train_batch_size * args.gradient_accumulation_steps * data,
        "losses": [entry["loss"] for entry in logs_of(trainer) if "loss" in entry],
        "epoch": trainer.state.epoch,
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "pp": "auto"}, {"dp": "auto", "pp": 2}])
def test_a_search_keeps_degrees_and_batch(degrees: dict[str, Any], tmp_path: Any) -> None:
    first, second = run_ranks(_trained, 2, args=(str(tmp_path), degrees), timeout_s=350)
    assert first["sizes"] == second["sizes"]
    assert first["losses"] == second["losses"]
    pipe, data, sequence, tensor = first["sizes"]
    assert pipe * data * sequence * tensor == 2
    found = {"pp": pipe, "dp": data, "sp": sequence, "tp": tensor}
    for name, degree in degrees.items():
        assert degree in ("auto", found[name])
    assert first["batch"] == 8  # two ranks with two micro-batches of two samples
    assert first["epoch"] == pytest.approx(2 * 8 / 40)
    assert len(first["losses"]) == 2
    assert all(3.0 < loss < 6.0 for loss in first["losses"])


def _evaluated(folder: str) -> None:
    init()
    args = MerakArguments(**arguments(folder, **QUICK))
    MerakTrainer(model("gpt2"), args, eval_dataset=Data("gpt2", 4)).evaluate()


def test_a_search_needs_a_training(tmp_path: Any) -> None:
    for outcome in catch_ranks(_evaluated, 2, args=(str(tmp_path),), timeout_s=60):
        assert isinstance(outcome.error, InputError), outcome.describe()
        assert "only training searches for degrees" in str(outcome.error)


def _by_file(path: str, degrees: dict[str, Any]) -> dict[str, Any]:
    return _trained(path, degrees, strategy_file=f"{path}/s.json")


def _with_strategy(path: Path, num_micro_batches: int) -> str:
    stages = ("parallel_mode", ([("pipeline", 2)], None))
    Strategy([stages, ("pipeline_parallel", {"num_micro_batches": num_micro_batches})]).save(path / "s.json")
    return str(path)


@pytest.mark.timeout(100)
def test_a_strategy_file_lays_out_the_ranks(tmp_path: Path) -> None:
    """As degrees that are named do; the global batch stays that of two processes."""
    path = _with_strategy(tmp_path, 4)
    found = run_ranks(_by_file, 2, args=(path, {}), timeout_s=90)[0]
    named = {"gradient_accumulation_steps": 4, "activation_checkpointing": False}
    wanted = run_ranks(partial(_trained, **named), 2, args=(path, {"pp": 2}), timeout_s=90)[0]
    assert found["sizes"] == (2, 1, 1, 1)
    assert found["batch"] == 8
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("degrees", "stages_micro_batches", "words"),
    [
        ({"dp": 2}, 4, "init: dp=2, but strategy_file=.* has dp=1"),
        ({}, 3, "1 data rank.s. with 3 micro-batch.es. do not divide a step of 8 samples"),
    ],
)
def test_a_strategy_file_that_does_not_fit(
    degrees: dict[str, Any], stages_micro_batches: int, words: str, tmp_path: Path
) -> None:
    args = (_with_strategy(tmp_path, stages_micro_batches), degrees)
    for outcome in catch_ranks(_by_file, 2, args=args, timeout_s=60):
        assert re.search(words, str(outcome.error)), outcome.describe()
