"""Every method on a GPU, against the same training by hand on one GPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from atorch_ns.testing import get_case, map_tensors
from atorch_ns.testing.parity import Trajectory, accelerate_case, assert_parity, compare
from tests.gpu.ranks import needs_gpus, on_gpus
from tests.gpu.training import Run, by_hand, under

pytestmark = pytest.mark.gpu

CASE = "tied_llama"
TOLERANCE = {"param_tol": 5e-3, "loss_tol": 1e-4}
"""Kernels of other shapes add in another order, and AdamW's first steps make much of the smallest gradients."""

BF16, FP16 = ("amp_native", "bf16"), ("amp_native", "fp16")
FLAT = ("zero2", {"not_use_fsdp": True})

ALONE: dict[str, list[Any]] = {
    "nothing": [],
    "checkpoint": ["checkpoint"],
    "checkpoint, reentrant": [("checkpoint", {"no_reentrant": False})],
    "checkpoint, offload": [("checkpoint", {"offload": True})],
    "checkpoint, selective": [("checkpoint", {"save_operators": ["aten.mm"]})],
    "gradient_accumulation": [("gradient_accumulation", 2)],
    "module_replace": ["module_replace"],
    "compile, aot_eager": [("compile", "aot_eager")],
    "compile, inductor": ["compile"],
    "compile, checkpoint": ["compile", "checkpoint"],
    "compile, checkpoint, offload": ["compile", ("checkpoint", {"offload": True})],
    "optimizer_offload": ["optimizer_offload"],
    "optimizer_offload, checkpoint": ["optimizer_offload", "checkpoint"],
}
ON_RANKS: dict[str, list[Any]] = {
    "ddp": ["ddp"],
    "fsdp": ["fsdp"],
    "fsdp, cpu_offload": [("fsdp", {"cpu_offload": True})],
    "fsdp, checkpoint, offload": ["fsdp", ("checkpoint", {"offload": True})],
    "fsdp, compile": ["fsdp", "compile"],
    "fsdp, compile, checkpoint": ["fsdp", "compile", "checkpoint"],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "zero2, flat": [FLAT],
    "ddp, optimizer_offload": ["ddp", "optimizer_offload"],
    "ddp, compile": ["ddp", "compile"],
}
ON_TWO: dict[str, list[Any]] = {
    "tensor": [("parallel_mode", ([("tensor", 2)], None))],
    "tensor, compile": [("parallel_mode", ([("tensor", 2)], None)), "compile"],
    "sequence": [("parallel_mode", ([("sequence", 2)], None))],
    "pipeline": [("parallel_mode", ([("pipeline", 2)], None))],
}
REDUCED: dict[str, tuple[list[Any], torch.dtype]] = {
    "bf16": ([BF16], torch.bfloat16),
    "fp16": ([FP16], torch.float16),
    "bf16, compile": ([BF16, "compile"], torch.bfloat16),
    "bf16, checkpoint": ([BF16, "checkpoint"], torch.bfloat16),
    "half bf16, optimizer_offload": ([("half", "bf16"), "optimizer_offload"], torch.bfloat16),
    "half fp16": ([("half", "fp16")], torch.float16),
}


@functools.cache
def _reference(autocast: torch.dtype | None = None) -> Trajectory:
    return by_hand(CASE, autocast=autocast)


def _all_under(strategies: Sequence[list[Any]]) -> list[Run]:
    """On one rank: one strategy after the other."""
    return [under(CASE, strategy) for strategy in strategies]


@pytest.mark.parametrize("name", ALONE)
def test_one_process(name: str) -> None:
    assert_parity(compare(_reference(), under(CASE, ALONE[name]).trajectory), **TOLERANCE)


@pytest.mark.parametrize("name", REDUCED)
def test_reduced_precision(name: str) -> None:
    strategy, dtype = REDUCED[name]
    found = under(CASE, strategy).trajectory
    plain = _reference(dtype)
    assert found.losses == pytest.approx(plain.losses, rel=2e-2)
    assert found.losses[-1] < found.losses[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ON_RANKS)
def test_on_ranks(name: str, num_ranks: int) -> None:
    needs_gpus(num_ranks)
    if name == "zero2, flat":
        pytest.importorskip("fairscale")
    for (run,) in on_gpus(_all_under, num_ranks, [ON_RANKS[name]]):
        assert_parity(compare(_reference(), run.trajectory), **TOLERANCE)


@pytest.mark.parametrize("name", ON_TWO)
def test_divided_over_two(name: str) -> None:
    for (run,) in on_gpus(_all_under, 2, [ON_TWO[name]]):
        assert_parity(compare(_reference(), run.trajectory), **TOLERANCE)


@pytest.mark.parametrize("strategy", [[], ["checkpoint", BF16], ["module_replace", "compile"]], ids=str)
def test_no_step_waits_for_the_device(strategy: list[Any]) -> None:
    """Copies from the host's memory and numbers that are read would leave the device without work for the next step."""
    case = get_case(CASE)
    result = accelerate_case(case, strategy, steps=1, global_batch=8)
    assert result.dataloader is not None
    (batch,) = result.dataloader
    batch = map_tensors(lambda tensor: tensor.cuda(), batch)
    for _ in range(3):  # the first steps compile, and look at what they are given
        result.train_step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = result.train_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


def test_blocks_share_one_inductor_graph() -> None:
    assert "1 graph, 0 graph breaks, 0 recompiles" in under(CASE, ["compile"]).report


def test_the_update_is_fused_and_can_be_looped() -> None:
    assert "AdamW: fused" in under(CASE, []).report
    run = under(CASE, [], {"optim_args": {"lr": 1e-3, "fused": False}})
    assert "AdamW: fused" not in run.report


def test_sharded_updates_are_fused() -> None:
    ((run,),) = on_gpus(_all_under, 1, [["fsdp"]])
    assert "AdamW: fused" in run.report


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize("strategy", [[], ["checkpoint", BF16]], ids=str)
def test_states_in_8_bits(package: str, strategy: list[Any]) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    optimizer = importlib.import_module(f"{package}.optim").AdamW8bit
    run = under(CASE, strategy, {"optim_func": optimizer, "optim_args": {"lr": 1e-3}})
    assert run.trajectory.losses[-1] < run.trajectory.losses[0]
