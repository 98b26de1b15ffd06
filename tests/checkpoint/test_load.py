"""Saved under one strategy, loaded under another, and trained on: the same as never interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from atorch_ns import checkpoint
from atorch_ns.checkpoint.tensors import describe_tensors
from atorch_ns.job import StepOptimizer
from atorch_ns.testing.models import Case, SyntheticDataset
from atorch_ns.testing.parity import ADAMW, Trajectory, assert_parity, assert_ranks_agree, compare, snapshot
from atorch_ns.testing.workers import run_ranks
from tests.checkpoint.jobs import (
    CASE,
    SAVED_AT,
    STEPS,
    batches,
    decayed_groups,
    learning_rates,
    make,
    step,
    train_and_save,
    uninterrupted,
)

SAVED_BY = {
    1: ["alone"],
    2: ["ddp", "fsdp", "zero1", "zero2", "half", "half_sharded", "half_bf16", "amp"],
    4: ["hybrid", "hybrid1"],
}
# By the number of ranks that load: under which strategy, from which.
LOADED_BY: dict[int, list[tuple[str, list[str]]]] = {
    1: [("alone", ["fsdp", "zero1", "half", "hybrid1"])],
    2: [
        ("ddp", ["ddp", "zero1", "hybrid", "alone"]),
        ("fsdp", ["fsdp", "ddp"]),
        ("checkpointed", ["zero2"]),
        ("zero1", ["zero1", "fsdp", "alone"]),
        ("zero2", ["zero2"]),
        ("half", ["half", "fsdp"]),
        ("half_sharded", ["zero1", "half_bf16"]),
        ("half_bf16", ["half_bf16"]),
        ("amp", ["amp"]),
        ("amp_sharded", ["amp"]),
    ],
    4: [("fsdp", ["zero1"]), ("hybrid", ["fsdp"]), ("hybrid1", ["ddp"])],
}
RATES_AT_3, RATES_AT_6 = [5e-3, 2.5e-3], [1.25e-3, 6.25e-4]


class Resumed(NamedTuple):
    """What one rank saw."""

    source: str
    target: str
    step: int
    extra: Any
    rates: list[list[float]]
    loaded: dict[str, torch.Tensor]
    scaler: dict[str, Any] | None
    trajectory: Trajectory


def _save_all(names: list[str], folder: Path) -> dict[str, list[float]]:
    return {name: train_and_save(name, folder / name) for name in names}


def _load_all(plan: list[tuple[str, list[str]]], folder: Path) -> list[Resumed]:
    return [_resume(source, target, folder) for target, sources in plan for source in sources]


def _resume(source: str, target: str, folder: Path) -> Resumed:
    result = make(target)
    initial = snapshot(result.model)
    loaded = checkpoint.load(folder / source, result)
    assert result.train_step.num_steps == SAVED_AT
    rates, weights = [learning_rates(result)], checkpoint.export_state_dict(result)
    optimizer = result.optim
    scaler = optimizer.scaler if isinstance(optimizer, StepOptimizer) else None
    state = None if scaler is None else scaler.state_dict()
    losses = [step(result, batch) for batch in batches(result)]
    rates.append(learning_rates(result))
    trajectory = Trajectory(losses=losses, initial=initial, final=snapshot(result.model))
    return Resumed(source, target, loaded["step"], loaded["extra"], rates, weights, state, trajectory)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for num_ranks, names in SAVED_BY.items():
        if num_ranks == 1:
            _save_all(names, folder)
        else:
            run_ranks(_save_all, num_ranks, args=(names, folder), timeout_s=120)
    return folder


@pytest.fixture(scope="module")
def reference() -> Trajectory:
    """Plain torch in one process, without any checkpoint."""
    return _plain_torch(CASE)


def _plain_torch(case: Case) -> Trajectory:
    model = case.build()
    optimizer = torch.optim.AdamW(decayed_groups(model), **ADAMW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    initial, losses = snapshot(model), []
    data = SyntheticDataset(case, STEPS * 8, seed=0)
    for number in range(STEPS):
        batch = data.batch(number, 8)
        optimizer.zero_grad()
        loss = case.loss_func(batch, case.call(model, batch))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return Trajectory(losses=losses, initial=initial, final=snapshot(model))


def _tolerances(*names: str) -> tuple[float, float]:
    if any(name == "half_bf16" for name in names):
        return 1.0, 5e-2
    if any(name.startswith(("half", "amp")) for name in names):
        return 0.15, 2e-3
    return 2e-4, 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", LOADED_BY)
def test_any_strategy_goes_on_from_any(saved: Path, reference: Trajectory, num_ranks: int) -> None:
    plan = LOADED_BY[num_ranks]
    if num_ranks == 1:
        ranks = [_load_all(plan, saved)]
    else:
        ranks = run_ranks(_load_all, num_ranks, args=(plan, saved), timeout_s=240)
    failures = []
    for position, resumed in enumerate(ranks[0]):
        try:
            _check(resumed, reference)
            assert_ranks_agree([rank[position].trajectory for rank in ranks])
        except AssertionError as error:
            failures.append(f"{resumed.source} → {resumed.target}: {error}")
    assert not failures, "\n\n".join(failures)


def _check(resumed: Resumed, reference: Trajectory) -> None:
    assert resumed.step == SAVED_AT
    assert resumed.extra == {"tokens": 384, "tags": ["a", None]}
    assert resumed.rates == [RATES_AT_3, RATES_AT_6]
    report = compare(
        Trajectory(losses=reference.losses[SAVED_AT:], initial=reference.initial, final=reference.final),
        resumed.trajectory,
    )
    param_tol, loss_tol = _tolerances(resumed.source, resumed.target)
    assert_parity(report, param_tol=param_tol, loss_tol=loss_tol)
    if resumed.target.startswith("amp"):
        assert resumed.scaler is not None
        grown = {"scale": 2048.0, "_growth_tracker": 1} if resumed.source == "amp" else {"scale": 1024.0}
        assert resumed.scaler.items() >= grown.items()


def _go_on_all(names: list[str], folder: Path) -> list[tuple[Trajectory, Trajectory]]:
    return [(_resume(name, name, folder).trajectory, uninterrupted(name)) for name in names]


def test_the_same_strategy_goes_on_bit_for_bit(saved: Path) -> None:
    """On two ranks, whose sums do not depend on the order; in half precision every rounding counts."""
    for resumed, whole in run_ranks(_go_on_all, 2, args=(["zero1", "fsdp", "half"], saved), timeout_s=120)[0]:
        assert resumed.losses == whole.losses[SAVED_AT:]
        assert_ranks_agree([resumed, whole])


def test_weights_are_carried_over_to_the_bit(saved: Path) -> None:
    """fp32 weights and fp32 masters, whatever the strategy that reads them."""

    def load_all() -> list[dict[str, torch.Tensor]]:
        found = []
        for target in ("zero1", "half_sharded"):
            for source in ("half", "alone"):
                result = make(target)
                checkpoint.load(saved / source, result)
                found.append(checkpoint.export_state_dict(result))
        return found

    first, second = run_ranks(load_all, 2, timeout_s=120)
    assert second == [{}] * len(first)
    for position, state_dict in enumerate(first):
        assert {tensor.dtype for tensor in state_dict.values()} == {torch.float32}
        assert_equal(state_dict, first[position % 2])
    assert not torch.equal(first[0]["lm_head.weight"], first[0]["lm_head.weight"].half().float())


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_folder_is_readable(saved: Path) -> None:
    manifest = json.loads((saved / "zero1" / "step-3" / "manifest.json").read_text())
    assert manifest["step"] == 3
    assert manifest["world_size"] == 2
    assert [method["name"] for method in manifest["strategy"]][-1] == "zero1"
    assert manifest["data"] == {"epoch": 0, "batches": 3, "global_batch_size": 8}
    assert [group["options"]["weight_decay"] for group in manifest["optimizer"]["groups"]] == [0.1, 0.0]
    keys = _keys(saved / "zero1" / "step-3")
    assert keys == _keys(saved / "fsdp" / "step-3")
    assert keys >= {"model.embed_tokens.weight", "optim.state.embed_tokens.weight.exp_avg", "rng.1.torch"}
    assert "model.lm_head.weight" not in keys  # tied: once, under its first name
    assert len(list((saved / "zero1" / "step-3").glob("__*"))) == 2  # each rank wrote its part


def _keys(folder: Path) -> set[str]:
    return set(describe_tensors(folder))
