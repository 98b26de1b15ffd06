"""Checkpoints of optimizers with states in 8 bits: from one way of sharding into another, or refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from atorch_ns import checkpoint
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.testing.models import Case
from atorch_ns.testing.parity import accelerate_case, snapshot
from atorch_ns.testing.workers import run_ranks
from tests.job.test_optimizer_checks_compact import CASE, _optimizer, _uncompiled
from tests.opt_lib.scenarios import error_of

__all__ = ["_uncompiled"]  # a fixture

DEEPSPEED = ("zero1", {"use_ds_zero": True})
TENSOR = ("parallel_mode", ([("tensor", 2)], None))
BLOCKS = "only states with one value, or one value per element,"


def _made(strategy: list[Any], optimizer: Any, *, case: Case = CASE, steps: int = 0) -> Result:
    result = accelerate_case(case, strategy, optim_func=optimizer, optim_args={"lr": 1e-3})
    assert result.dataloader is not None
    for _, batch in zip(range(steps), result.dataloader, strict=False):
        result.train_step(batch)
    return result


def _states(result: Result) -> dict[str, torch.Tensor]:
    """Every state of elements, whole and in fp32."""
    states = result.job.make_states(result.job, result.optim).optimizer_states()
    found = {}
    for name, entries in states.tensors.items():
        for entry, value in entries.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}.{entry}"] = torch.zeros(whole.shape).copy_(whole)
    return found


def _refusals(optimizer: Any, folder: Path) -> list[Any]:
    checkpoint.save(folder, _made(["ddp"], optimizer, steps=1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        flat = _made([DEEPSPEED], optimizer, steps=1)
    before, states = snapshot(flat.model), len(flat.optim.state)  # type: ignore[union-attr]
    refused = [
        error_of(lambda: checkpoint.load(folder, flat), CheckpointError),
        error_of(lambda: checkpoint.save(folder / "other", flat), CheckpointError),
    ]
    after = snapshot(flat.model)
    kept = all(torch.equal(after[name], before[name]) for name in before)
    warned = sum("checkpoint.save will refuse" in str(warning.message) for warning in told)
    noted = any("checkpoint.save will refuse" in note for note in flat.report.notes)
    return [refused, kept and len(flat.optim.state) == states, warned, noted]  # type: ignore[union-attr]


def test_blocks_do_not_go_into_flat_pieces(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    found = run_ranks(_refusals, 2, args=(_optimizer("bitsandbytes"), tmp_path), timeout_s=100)
    for refused, kept, _, noted in found:
        for message in refused:
            assert BLOCKS in message
            assert any(f"{entry}1'" in message or f"{entry}2'" in message for entry in ("absmax", "qmap"))
            assert "such as ddp or zero1" in message
        assert kept
        assert noted
    assert [warned for *_, warned, _ in found] == [1, 0]


def _moved(optimizer: Any, folder: Path) -> list[Any]:
    found: list[Any] = []
    for saved, loaded in ((["zero1"], [TENSOR]), (["fsdp"], [TENSOR]), ([TENSOR], ["fsdp"])):
        first = _made(saved, optimizer, steps=2)
        here = folder / f"{saved[0]}"[:6]
        checkpoint.save(here, first)
        alone = _made(["ddp"], optimizer)
        checkpoint.load(here, alone)
        second = _made(loaded, optimizer)
        checkpoint.load(here, second)
        wanted, states = _states(alone), _states(second)
        found.append([name for name in wanted if not torch.equal(wanted[name], states[name])])
        found.append(min(float(wanted[name].abs().max()) for name in wanted) > 0)
        assert second.dataloader is not None
        found.append(bool(torch.isfinite(second.train_step(next(iter(second.dataloader))))))
    return found


def test_states_of_torchao_load_where_another_dim_is_divided(tmp_path: Path) -> None:
    for found in run_ranks(_moved, 2, args=(_optimizer("torchao"), tmp_path), timeout_s=100):
        assert found == [[], True, True] * 3


@pytest.mark.parametrize("strategy", [["zero1"], [("zero2", {"not_use_fsdp": True})]])
def test_the_state_of_this_ranks_part_is_shown(strategy: list[Any]) -> None:
    pytest.importorskip("fairscale")

    def steps() -> list[Any]:
        result = _made(strategy, torch.optim.AdamW, steps=3)
        optimizer: Any = result.optim
        first = [float(state["step"]) for state in optimizer.state.values()]
        optimizer.consolidate_state_dict(0)
        if torch.distributed.get_rank() == 0:
            saved = optimizer.state_dict()
            assert len(saved["state"]) == len(list(CASE.build().parameters()))
            optimizer.load_state_dict(saved)
            assert result.dataloader is not None
        pairs = zip(optimizer.state, optimizer.optim.state, strict=True)
        return [first, all(shown is updated for shown, updated in pairs)]

    for counts, shared in run_ranks(steps, 2, timeout_s=60):
        assert set(counts) == {3.0}
        assert shared
