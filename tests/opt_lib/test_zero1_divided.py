"""zero1 where ranks hold parts of the model: trained as in one process, with states divided over the data ranks."""

from __future__ import annotations

import functools
import traceback
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import (
    ADAMW,
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import named
from tests.parity.variants import TOLERANCES, global_batch

PIPELINE = ("pipeline_parallel", {"num_micro_batches": 2})
ZERO_BUBBLE = ("pipeline_parallel", {"num_micro_batches": 4, "schedule": "ZBVZeroBubble"})
MESHES: dict[str, tuple[str, dict[str, int], tuple[Any, ...]]] = {
    "tensor": ("hf_llama", {"tensor": 2, "data": 2}, ()),
    "pipeline": ("tied_llama", {"pipeline": 2, "data": 2}, (PIPELINE,)),
    "zero bubble": ("tied_llama", {"pipeline": 2, "zero": 2}, (ZERO_BUBBLE,)),
    "sequence": ("hf_bert", {"sequence": 2, "data": 2}, ()),
    "expert": ("hf_mixtral", {"expert": 2, "data": 2}, ()),
    "compiled": ("tied_llama", {"tensor": 2, "zero": 2}, (("compile", "aot_eager"), "checkpoint")),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, dict(ADAMW)),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "eps": 1e-4, "fused": False}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
PRECISIONS: dict[str, tuple[Any, ...]] = {
    "float32": (),
    "amp float16": (("amp_native", "fp16"),),
    "half float16": (("half", "fp16"),),
}


class Row(NamedTuple):
    mesh: str
    optimizer: str = "AdamW"
    precision: str = "float32"
    max_norm: float | None = None


ROWS: dict[str, list[Row]] = {
    "meshes": [*(Row(mesh) for mesh in MESHES), Row("tensor", "SGD", max_norm=0.1)],
    "optimizers": [
        *(Row(mesh, name, max_norm=0.1) for mesh in ("tensor", "pipeline") for name in ("Adam", "SGD")),
        *(Row("sequence", "SGD"), Row("expert", "Adam", max_norm=0.1)),
    ],
    "precisions": [
        *(Row("tensor", precision=precision) for precision in ("amp float16", "half float16")),
        Row("pipeline", precision="half float16"),
    ],
}


def _train_all(rows: list[Row]) -> list[Trajectory | str]:
    found: list[Trajectory | str] = []
    for row in rows:
        case, axes, methods = MESHES[row.mesh]
        strategy = [
            ("parallel_mode", (list(axes.items()), None)),
            "zero1",
            *methods,
            *PRECISIONS[row.precision],
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(
                    accelerated_run(get_case(case), strategy, max_grad_norm=row.max_norm, **_arguments(row))
                )
            except Exception:  # reported per row; a failure of one rank alone runs into the time limit
                found.append(traceback.format_exc())
    return found


def _arguments(row: Row) -> dict[str, Any]:
    function, arguments = OPTIMIZERS[row.optimizer]
    return {"optim_func": function, "optim_args": arguments, "global_batch": global_batch(row.precision)}


@functools.cache
def _reference(row: Row) -> Trajectory:
    dtype = None if row.precision == "float32" else torch.float16
    return reference_run(
        get_case(MESHES[row.mesh][0]), autocast_dtype=dtype, max_norm=row.max_norm, **_arguments(row)
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", named(ROWS, often=("meshes",)))
def test_trained_as_in_one_process(name: str) -> None:
    rows = ROWS[name]
    for case, _, _ in MESHES.values():
        get_case(case).build()  # imports what ranks would import
    ranks = run_ranks(_train_all, 4, args=(rows,), timeout_s=200)
    failures = []
    for position, row in enumerate(rows):
        runs = [rank[position] for rank in ranks]
        try:
            trajectories = [run for run in runs if isinstance(run, Trajectory)]
            assert len(trajectories) == 4, next(run for run in runs if isinstance(run, str))
            param_tol, loss_tol = TOLERANCES[row.precision]
            assert_parity(compare(_reference(row), trajectories[0]), param_tol=param_tol, loss_tol=loss_tol)
            assert_ranks_agree(trajectories)
        except AssertionError as error:
            failures.append(f"{row}: {error}")
    assert not failures, "\n\n".join(failures)


def _state_elements(mesh: str) -> tuple[int, int, float]:
    """Elements of the states that a rank has, of its parts of parameters; the learning rate of its own optimizer."""
    case, axes, methods = MESHES[mesh]
    strategy = [("parallel_mode", (list(axes.items()), None)), "zero1", *methods]
    arguments = {
        "lr_scheduler_cls": torch.optim.lr_scheduler.StepLR,
        "lr_scheduler_args": {"step_size": 1, "gamma": 0.5},
    }
    result = accelerate_case(get_case(case), strategy, steps=2, **arguments)
    for batch in result.dataloader:
        result.train_step(batch)
        result.lr_scheduler.step()

    def elements(tensors: Any) -> int:
        return sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in tensors)

    states = elements(each for state in result.optim.state.values() for each in state.values() if each.dim())
    parts = elements(each for group in result.optim.param_groups for each in group["params"])
    return states, parts, result.optim.optim.param_groups[0]["lr"]


@pytest.mark.parametrize("mesh", ["tensor", "pipeline", "expert"])
def test_each_rank_keeps_the_states_of_its_share(mesh: str) -> None:
    get_case(MESHES[mesh][0]).build()
    ranks = run_ranks(_state_elements, 4, args=(mesh,), timeout_s=60)
    for states, parts, rate in ranks:
        assert 0.35 < states / (2 * parts) < 0.65
        assert rate == pytest.approx(ADAMW["lr"] / 2)
