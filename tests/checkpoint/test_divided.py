"""Saved by ranks that hold parts of a model, loaded by others that hold other parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atorch_ns import checkpoint
from atorch_ns.checkpoint.manifest import Manifest
from atorch_ns.checkpoint.tensors import describe_tensors
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.testing.parity import (
    Trajectory,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
    whole_parameters,
)
from atorch_ns.testing.workers import run_ranks
from tests.job.divided import CASE, build, make

SAVED_AT = 2
JOBS: dict[str, tuple[dict[str, int], list[Any]]] = {
    "alone": ({}, []),
    "fsdp": ({"zero": 2}, ["fsdp"]),
    "tensor": ({"tensor": 2}, []),
    "pipeline": ({"pipeline": 2}, []),
    "tensor half": ({"tensor": 2}, [("half", "fp16")]),
    "tensor x zero": ({"tensor": 2, "zero": 2}, ["fsdp"]),
    "tensor x data": ({"tensor": 2, "data": 2}, []),
    "tensor x pipeline": ({"tensor": 2, "pipeline": 2}, []),
    "pipeline x zero": ({"pipeline": 2, "zero": 2}, ["fsdp"]),
    "tensor x data, zero1": ({"tensor": 2, "data": 2}, ["zero1"]),
    "tensor x data, zero1, half": ({"tensor": 2, "data": 2}, ["zero1", ("half", "fp16")]),
    "pipeline x data, zero1": ({"pipeline": 2, "data": 2}, ["zero1"]),
}
SAVED_BY = {
    1: ["alone"],
    2: ["tensor", "pipeline", "tensor half"],
    4: [
        *("tensor x zero", "tensor x pipeline", "pipeline x zero"),
        *("tensor x data, zero1", "tensor x data, zero1, half", "pipeline x data, zero1"),
    ],
}
# By the number of ranks that load: which job, from which.
LOADED_BY = {
    1: [("alone", source) for source in ("tensor", "pipeline", "tensor x zero", "tensor x pipeline")],
    2: [
        ("tensor", "tensor"),
        ("tensor", "pipeline"),
        ("tensor", "tensor half"),
        ("tensor", "alone"),
        ("fsdp", "tensor"),
        ("fsdp", "pipeline"),
        ("pipeline", "pipeline"),
        ("pipeline", "tensor"),
        ("pipeline", "pipeline x zero"),
        ("fsdp", "tensor x data, zero1"),
    ],
    4: [
        ("tensor x zero", "tensor"),
        ("tensor x zero", "tensor x zero"),
        ("tensor x data", "pipeline"),
        ("tensor x pipeline", "alone"),
        ("pipeline x zero", "tensor x zero"),
        ("tensor x data, zero1", "tensor x zero"),
        ("tensor x data, zero1", "pipeline x data, zero1"),
        ("tensor x data, zero1, half", "tensor x data, zero1, half"),
        ("pipeline x data, zero1", "pipeline x data, zero1"),
        ("pipeline x data, zero1", "tensor x data, zero1"),
    ],
}


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups that both stages have a part of, and one that only the first has."""
    named = dict(model.named_parameters())
    stem = {name: named.pop(name) for name in list(named) if name.startswith("stem")}
    small = [p for p in named.values() if p.dim() == 1]
    return [
        {"params": [p for p in named.values() if p.dim() > 1]},
        {"params": small, "weight_decay": 0.0, "lr": 5e-3},
        {"params": list(stem.values()), "lr": 2e-3},
    ]


def job(name: str, **arguments: Any) -> Result:
    axes, methods = JOBS[name]
    return make(axes, methods, optim_param_func=groups, **arguments)


def _save_all(names: list[str], folder: Path) -> None:
    for name in names:
        result = job(name)
        batches = iter(result.dataloader)
        for _ in range(SAVED_AT):
            result.train_step(next(batches))
        checkpoint.save(folder / name, result)


def _resume_all(pairs: list[tuple[str, str]], folder: Path) -> list[Trajectory]:
    return [_resume(job(target), folder / source) for target, source in pairs]


def _resume(result: Result, folder: Path) -> Trajectory:
    checkpoint.load(folder, result)
    initial = whole_parameters(result)
    losses = [float(result.train_step(batch)) for batch in result.dataloader]
    return Trajectory(losses=losses, initial=initial, final=whole_parameters(result))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided")
    for num_ranks, names in SAVED_BY.items():
        run_ranks(_save_all, num_ranks, args=(names, folder), timeout_s=60)
    return folder


@pytest.fixture(scope="module")
def reference() -> Trajectory:
    return reference_run(CASE, optim_param_func=groups)


@pytest.mark.parametrize("num_ranks", LOADED_BY)
def test_trained_on_as_if_never_interrupted(num_ranks: int, saved: Path, reference: Trajectory) -> None:
    pairs = LOADED_BY[num_ranks]
    ranks = run_ranks(_resume_all, num_ranks, args=(pairs, saved), timeout_s=60)
    for position, (target, source) in enumerate(pairs):
        runs = [rank[position] for rank in ranks]
        rest = replace(reference, losses=reference.losses[SAVED_AT:])
        param_tol, loss_tol = (0.05, 5e-3) if "half" in source else (2e-4, 1e-5)
        try:
            assert_ranks_agree(runs)
            assert_parity(compare(rest, runs[0]), param_tol=param_tol, loss_tol=loss_tol)
        except AssertionError as error:
            raise AssertionError(f"{source} -> {target}: {error}") from error


def _export(name: str, source: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    result = job(name)
    checkpoint.load(folder / source, result)
    whole = whole_parameters(result)
    checkpoint.export_safetensors(result, folder / f"{name} weights")
    return checkpoint.export_state_dict(result), whole


@pytest.mark.parametrize("name", ["tensor", "pipeline", "tensor x zero", "tensor x pipeline"])
def test_weights_are_the_same_bits_whatever_divides_them(name: str, saved: Path) -> None:
    """Loaded and given out again: on rank 0 as the plain model's state_dict, tied names and buffers too."""
    plain = run_ranks(_export, 1, args=("alone", "tensor", saved))[0]
    num_ranks = 4 if " x " in name else 2
    ranks = run_ranks(_export, num_ranks, args=(name, "tensor", saved))
    exported, _ = ranks[0]
    assert list(exported) == list(plain[0])
    assert exported.keys() == CASE.build().state_dict().keys()
    for key, tensor in plain[0].items():
        assert torch.equal(exported[key], tensor), key
    assert all(other == {} for other, _ in ranks[1:])
    for _, whole in ranks:
        assert [key for key in whole if not torch.equal(whole[key], plain[0][key])] == []
    safetensors = pytest.importorskip("safetensors.torch")
    written = safetensors.load_file(saved / f"{name} weights" / "model.safetensors")
    assert written.keys() == plain[0].keys() - {"blocks.1.shift"}


def _given(name: str) -> dict[str, torch.Tensor]:
    result = job(name)
    given = {key: value + 1.0 for key, value in CASE.build().state_dict().items()}
    checkpoint.import_state_dict(result, given if dist.get_rank() == 0 else {})
    return {key: value - given[key] for key, value in whole_parameters(result).items()}


@pytest.mark.parametrize("name", ["tensor", "pipeline", "tensor x zero"])
def test_plain_weights_are_taken_in_parts(name: str) -> None:
    for rank in run_ranks(_given, 4 if " x " in name else 2, args=(name,)):
        assert len(rank) == len(list(CASE.build().named_parameters(remove_duplicate=False)))
        assert max(float(difference.abs().max()) for difference in rank.values()) == 0.0


def test_a_checkpoint_of_a_pipeline_tells_of_the_whole_model(saved: Path) -> None:
    folders = [saved / name / f"step-{SAVED_AT}" for name in ("pipeline", "alone")]
    pipeline, alone = (Manifest.read(folder) for folder in folders)
    assert pipeline.weights == alone.weights
    assert list(pipeline.weights) == list(alone.weights)
    assert pipeline.buffers == alone.buffers
    assert pipeline.optimizer == alone.optimizer
    keys = [{key for key in describe_tensors(folder) if not key.startswith("rng.")} for folder in folders]
    assert keys[0] == keys[1]


def _refused(folder: Path) -> str:
    wider = replace(CASE, build=lambda: build(hidden=32))
    result = make({"pipeline": 2}, case=wider, optim_param_func=groups)
    before = whole_parameters(result)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder / "pipeline", result)
    assert all(torch.equal(value, before[name]) for name, value in whole_parameters(result).items())
    return str(caught.value)


def test_another_model_is_refused_on_every_stage_alike(saved: Path) -> None:
    first, second = run_ranks(_refused, 2, args=(saved,))
    assert first == second
    assert "6 parameter(s) differ" in first
    assert "blocks.0" in first
    assert "blocks.1" in first


def _interrupted(axes: dict[str, int], folder: Path) -> list[list[float]]:
    """Losses with dropout: of a whole run, and of the rest of one that was saved and loaded."""
    case = replace(CASE, build=lambda: build(dropout=0.3))
    torch.manual_seed(5)
    whole = make(axes, case=case)
    losses = []
    for number, batch in enumerate(whole.dataloader):
        losses.append(float(whole.train_step(batch)))
        if number + 1 == SAVED_AT:
            checkpoint.save(folder, whole)
    torch.manual_seed(6)
    resumed = make(axes, case=case)
    checkpoint.load(folder, resumed)
    rest = [float(resumed.train_step(batch)) for batch in resumed.dataloader]
    return [losses[SAVED_AT:], rest]


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_dropout_goes_on_to_the_bit(axes: dict[str, int], tmp_path: Path) -> None:
    for whole, rest in run_ranks(_interrupted, 2, args=(axes, tmp_path)):
        assert rest == whole
