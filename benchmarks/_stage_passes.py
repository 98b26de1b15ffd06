"""Passes of tiny stages in a pipeline: what they cost the host beside the layers, in operators that it could start.

By it the planner prices every stage: ``_STAGE_OPERATORS`` (:mod:`atorch_ns.estimate.time.pipeline`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.cluster.speed_probes import compute_probes
from benchmarks._ranks import on_ranks
from benchmarks._results import Spread

__all__ = ["host_start_seconds", "stage_rows"]

_RANKS, _BLOCKS, _WIDTH = 2, 8, 32
_FEW, _MANY = 4, 20
"""Micro-batches of two steps, whose difference leaves out what a step costs once."""

_STAGES = {"1F1B": 1, "Interleaved1F1B": 2}
"""Stages on each rank, by schedule."""


def stage_rows(*, quick: bool, report: Callable[[str], object]) -> list[dict[str, Any]]:
    """A row for each schedule."""
    rounds = 2 if quick else 24
    ((alone, start_s),) = on_ranks(_seconds, 1, None, rounds)
    rows = []
    for schedule, stages in _STAGES.items():
        report(f"schedules: passes of a stage, {schedule}")
        ranks = on_ranks(_seconds, _RANKS, schedule, rounds)
        more = [sum(found) - one for *found, one in zip(*(times for times, _ in ranks), alone, strict=True)]
        rows.append(
            {
                "part": "passes of a stage",
                "plan": schedule,
                "step": f"{_BLOCKS} linear layers of width {_WIDTH} on {_RANKS} ranks",
                "pairs": rounds,
                "operators": Spread.of(one / (_RANKS * stages) / start_s for one in more),
            }
        )
    return rows


def host_start_seconds() -> float:
    """Seconds in which the host starts one operator, as a calibration measures them."""
    (name, probe), *_ = (one for one in compute_probes("cpu").items() if one[0].startswith("operators/"))
    return Spread.of(probe() for _ in range(9)).median / int(name.partition("/")[2])


def _seconds(schedule: str | None, rounds: int) -> tuple[list[float], float]:
    """On one rank: processor seconds of a micro-batch in each round, and of starting an operator."""
    steps = {num: _step(schedule, num) for num in (_FEW, _MANY)}
    found = []
    for number in range(rounds + 2):
        taken = {num: _taken(step, num) for num, step in steps.items()}
        if number > 1:
            found.append((taken[_MANY] - taken[_FEW]) / (_MANY - _FEW))
    return found, host_start_seconds()


def _taken(step: Callable[[torch.Tensor], object], num: int) -> float:
    batch = torch.ones(num, _WIDTH)
    started = time.process_time()
    step(batch)
    return time.process_time() - started


def _step(schedule: str | None, num: int) -> Callable[[torch.Tensor], object]:
    micro: Mapping[str, Any] = {"num_micro_batches": num}
    alone: list[Any] = [("gradient_accumulation", micro)]
    divided: list[Any] = [
        ("parallel_mode", ([("pipeline", _RANKS)], None)),
        ("pipeline_parallel", {"schedule": schedule, "split_method": "uniform", **micro}),
    ]
    _, result, _ = auto_accelerate(
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_BLOCKS))),
        torch.optim.SGD,
        loss_func=lambda _, output: output.square().mean(),
        optim_args={"lr": 1e-3},
        sample_batch=torch.ones(num, _WIDTH),
        load_strategy=divided if schedule else alone,
    )
    assert result is not None
    step: Callable[[torch.Tensor], object] = result.train_step
    return step
