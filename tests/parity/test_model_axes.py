"""Every axis that divides a model, alone and with others, on every kind of model, against plain torch in one process.

Each mesh trains all models as it is, and some of them with recomputation and with bf16: over all meshes every model
meets both, and every mesh does.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.networks import TiedLlama
from atorch_ns.testing.parity import (
    Trajectory,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import named
from tests.parity.variants import TOLERANCES, global_batch

MODELS = ("tied_llama", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit", "hf_mixtral", "encoder_decoder")
DEEP = "deep_llama"
"""Enough layers for eight stages."""

# In bf16 a run that adds in another order rounds otherwise from the first activation on. Then a few of Mixtral's
# tokens go to other experts, whose gradients change as a whole; and ViT's loss is the mean of 128 targets, not of
# a thousand and more.
ROUNDING = {"hf_mixtral": (0.5, 1e-3), "hf_vit": (0.15, 4e-3)}

BF16 = ("amp_native", "bf16")
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


class Row(NamedTuple):
    """A model, a mesh (innermost axis first) and methods besides those that the mesh needs."""

    case: str
    axes: dict[str, int]
    methods: tuple[Any, ...] = ()

    @property
    def precision(self) -> str:
        return "amp bfloat16" if BF16 in self.methods else "float32"

    @property
    def strategy(self) -> list[Any]:
        return [("parallel_mode", (list(self.axes.items()), None)), *self.methods]

    @property
    def label(self) -> str:
        return f"{self.case} on {self.axes} with {list(self.methods)}"


def on_models(
    axes: dict[str, int], *methods: Any, models: Iterable[str] = MODELS, turn: int = 0
) -> Iterator[Row]:
    """Every model as it is; one with recomputation and another in bf16, other ones with every ``turn``."""
    models = tuple(models)
    for case in models:
        yield Row(case, axes, methods)
    yield Row(models[turn % len(models)], axes, (*methods, "checkpoint"))
    yield Row(models[(turn + 1) % len(models)], axes, (*methods, BF16))


def some_models(turn: int) -> tuple[str, ...]:
    """Three of them, other ones with every ``turn``."""
    return tuple(MODELS[(3 * turn + step) % len(MODELS)] for step in range(3))


def pipeline(schedule: str, num_micro_batches: int) -> Any:
    """The method with these settings."""
    return ("pipeline_parallel", {"schedule": schedule, "num_micro_batches": num_micro_batches})


def sequence(kind: str) -> Any:
    """The method with attention of this kind."""
    return ("sequence_parallel", {"kind": kind})


TABLE: dict[str, tuple[int, list[Row]]] = {
    "tensor 2": (2, [*on_models({"tensor": 2}, models=("mlp", *MODELS), turn=0)]),
    "sequence 2 ulysses": (2, [*on_models({"sequence": 2}, sequence("ulysses"), turn=1)]),
    "sequence 2 ring": (2, [*on_models({"sequence": 2}, sequence("ring"), turn=2)]),
    "expert 2": (2, [*on_models({"expert": 2}, models=("hf_mixtral",))]),
    "selective": (
        2,
        [
            Row(case, axes, (*methods, ("checkpoint", {"save_operators": rule})))
            for rule in ("every_second_product", "all_but_attention")
            for case, axes, methods in (
                ("hf_llama", {"tensor": 2}, ()),
                ("hf_bert", {"sequence": 2}, ()),
                ("hf_mixtral", {"expert": 2}, ()),
                ("hf_gpt2", {"pipeline": 2}, (pipeline("1F1B", 4),)),
                ("hf_llama", {"data": 2}, ("fsdp", BF16)),
                ("tied_llama", {"data": 2}, ("fsdp", ("compile", "aot_eager"))),
                (
                    "hf_gpt2",
                    {"tensor": 2},
                    (("tensor_parallel", {"sequence": True}), ("compile", "aot_eager")),
                ),
            )
        ],
    ),
    "pipeline 2 1F1B": (2, [*on_models({"pipeline": 2}, pipeline("1F1B", 4), models=("mlp", *MODELS))]),
    "pipeline 2 GPipe": (2, [*on_models({"pipeline": 2}, pipeline("GPipe", 4), turn=1)]),
    **{
        f"pipeline 2 {name}": (
            2,
            [*on_models({"pipeline": 2}, pipeline(name, 4), models=some_models(turn), turn=turn)],
        )
        for turn, name in enumerate(SCHEDULES[2:])
    },
    "tensor 4": (4, [*on_models({"tensor": 4}, models=("tied_llama", "hf_gpt2", "hf_bert", "hf_vit"))]),
    "pipeline 4": (
        4,
        [
            *(Row(DEEP, {"pipeline": 4}, (pipeline(name, 8),)) for name in SCHEDULES),
            Row("hf_gpt2", {"pipeline": 4}, (pipeline("1F1B", 4),)),
            Row("encoder_decoder", {"pipeline": 4}, (pipeline("GPipe", 4),)),
            Row(DEEP, {"pipeline": 4}, (pipeline("1F1B", 8), "checkpoint")),
            Row(DEEP, {"pipeline": 4}, (pipeline("Interleaved1F1B", 8), BF16)),
        ],
    ),
    "tensor 2 x pipeline 2": (4, [*on_models({"tensor": 2, "pipeline": 2}, pipeline("1F1B", 4), turn=3)]),
    "pipeline 2 x data 2": (4, [*on_models({"pipeline": 2, "data": 2}, pipeline("1F1B", 2), turn=4)]),
    "tensor 2 x zero 2": (4, [*on_models({"tensor": 2, "zero": 2}, "fsdp", turn=5)]),
    "tensor 2 x pipeline 2 x data 2": (
        8,
        [
            *on_models(
                {"tensor": 2, "pipeline": 2, "data": 2},
                pipeline("1F1B", 2),
                models=("tied_llama", "hf_llama", "hf_gpt2"),
                turn=6,
            )
        ],
    ),
}


OFTEN = (
    *("tensor 2", "sequence 2 ulysses", "sequence 2 ring", "expert 2", "selective"),
    *(f"pipeline 2 {name}" for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")),
)
"""Run whenever the tests run; the others by `make test-all`."""


def case_of(name: str) -> Case:
    """The case, or the one that is deep."""
    return _deep() if name == DEEP else get_case(name)


def _deep() -> Case:
    def build() -> TiedLlama:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            return TiedLlama(num_layers=8)

    return dataclasses.replace(get_case("tied_llama"), name=DEEP, build=build)


@functools.cache
def reference(case: str, precision: str) -> Trajectory:
    """Plain torch in one process, in the same precision."""
    dtype = torch.bfloat16 if precision != "float32" else None
    return reference_run(case_of(case), global_batch=global_batch(precision), autocast_dtype=dtype)


def tolerances(row: Row) -> tuple[float, float]:
    """Of a parameter in units of its update, and of a loss."""
    usual = TOLERANCES[row.precision]
    return usual if row.precision == "float32" else ROUNDING.get(row.case, usual)


def _train_all(rows: list[Row]) -> list[Trajectory | str]:
    results: list[Trajectory | str] = []
    for row in rows:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                batch = global_batch(row.precision)
                results.append(accelerated_run(case_of(row.case), row.strategy, global_batch=batch))
            except Exception:  # reported per row; a failure of one rank alone runs into the time limit
                results.append(traceback.format_exc())
    return results


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", named(TABLE, often=OFTEN))
def test_parity(name: str) -> None:
    num_ranks, rows = TABLE[name]
    for case in {row.case for row in rows}:
        case_of(case).build()  # imports what ranks would import
    ranks = run_ranks(_train_all, num_ranks, args=(rows,), timeout_s=200)
    failures = []
    for position, row in enumerate(rows):
        runs = [rank[position] for rank in ranks]
        try:
            trajectories = [run for run in runs if isinstance(run, Trajectory)]
            assert len(trajectories) == num_ranks, next(run for run in runs if isinstance(run, str))
            param_tol, loss_tol = tolerances(row)
            report = compare(reference(row.case, row.precision), trajectories[0])
            assert_parity(report, param_tol=param_tol, loss_tol=loss_tol)
            assert_ranks_agree(trajectories)
        except AssertionError as error:
            failures.append(f"{row.label}: {error}")
    assert not failures, "\n\n".join(failures)
