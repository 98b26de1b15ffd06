"""Pipeline schedules: their speed against torch's, and what recomputing early gains against what simulation says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.pipeline import PipelineStep, StageCosts, get_schedule
from benchmarks._llama import SMALL, TINY, Llama
from benchmarks._model_axes_by_hand import pipeline_step
from benchmarks._pairs import Block, Pair, combine, measure, neighbours, spread_of
from benchmarks._ranks import barrier, on_ranks
from benchmarks._results import Column, Findings, Spread
from benchmarks._slow_stage import SLOW_WIDTH, Slow, SlowStage
from benchmarks._split_backward import split_rows
from benchmarks._stage_passes import stage_rows
from benchmarks.model_axes import MICRO_BATCHES, TARGET, Plan, batch_text, compared

__all__ = ["GAIN_TARGET", "gain_row", "run"]

GAIN_TARGET = 0.10
"""How far a measured gain may be from the simulated one, as a share of that."""

_TORCHS = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_MERAKS = ("PreRecompute1F1B", "LastNoRecompute1F1B", "ShiftedCriticalPath")
_PAIRS: tuple[Pair, ...] = tuple((name, "1F1B") for name in _MERAKS)
_STAGES, _ROWS = 4, 8
_SECONDS = ((0.04, 0.08), (0.04, 0.04))
"""Of a stage's forward and backward pass for one micro-batch: what Transformers have, and another ratio."""

_TEXT = """
*speed*: a training step of `result.train_step`, over that of `torch.distributed.pipelining` by hand under its own
schedule of the name, with the same cut, model, micro-batches and two processes, as in `model_axes`. *control*: a second
model by hand against the first. *ratio*: the median of the ratios of neighbouring steps, slowest rank's elapsed time,
with its 95 % confidence interval. *within*: at most {target}.

*recomputing early*: a training step under Merak's schedules and under 1F1B, both with recomputation, on four processes
with a stage each, whose passes sleep for fixed times: the machine's speed says nothing then. *gain*: milliseconds by
which the step is shorter than 1F1B's, simulated with these times, and measured, the median over neighbouring steps (with its
quartiles). *ratio*: measured over simulated. *within*: at most {gain:.0%} off.

*split backward*: a backward pass whose weight gradients of linear layers are computed later, on one core: both its parts over
the whole pass (*ratio*), the *weights' share* of the whole, and what deferring adds to both passes where
products take no time, in *operators* to start for each matrix. *passes of a stage*: what a micro-batch costs the host on a
stage beside its layers, in operators that it could start instead. The planner prices schedules that split with a share of
0.3 and 3.4 operators, and every stage with 45.
"""
_COLUMNS = (
    Column(title="part", key="part"),
    Column(title="schedule", key="plan"),
    Column(title="step", key="step"),
    Column(title="ratio", key="wall_ratio", confidence=True),
    Column(title="pairs", key="pairs"),
    Column(title="within", key="holds"),
    Column(title="ms by hand, wall (p25..p75)", key="wall_ms_by_hand", digits=0),
    Column(title="simulated gain, ms", key="simulated_ms", digits=0),
    Column(title="simulated gain, %", key="simulated_percent", digits=1),
    Column(title="measured gain, ms (p25..p75)", key="measured_ms", digits=1),
    Column(title="1F1B simulated, ms", key="base_ms", digits=0),
    Column(title="1F1B measured, ms (p25..p75)", key="base_measured_ms", digits=0),
    Column(title="weights' share", key="weight_share", confidence=True),
    Column(title="operators", key="operators", digits=1, confidence=True),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every schedule.

    Args:
        quick: a tiny model and few pairs, to see that it works; the numbers mean little.
        report: told what is being done.
    """
    model, launches, rounds = (TINY, 1, 2) if quick else (SMALL, 4, 8)
    torch.optim.AdamW(model.build("meta").parameters())  # imports here, once, what every rank would
    rows = split_rows(quick=quick, report=report) + stage_rows(quick=quick, report=report)
    for forward_s, backward_s in _SECONDS:
        report(f"schedules: forward {forward_s} s, backward {backward_s} s")
        blocks = combine(on_ranks(_slowed, _STAGES, forward_s, backward_s, 2 if quick else 10))
        rows += [gain_row(blocks, name, forward_s, backward_s) for name in _MERAKS]
    for name in _TORCHS:
        found = compared(
            _plan(name, model), model, launches, rounds, lambda text: report(f"schedules: {text}")
        )
        rows += [{"part": "speed", **row} for row in found]
    return Findings(
        name="schedules",
        title="Pipeline schedules",
        text=_TEXT.format(target=TARGET, gain=GAIN_TARGET),
        columns=_COLUMNS,
        rows=sorted(rows, key=lambda row: row["part"] != "speed"),
        settings={
            "model of the part speed": model.describe(),
            "its batch": batch_text(),
            "its starts": launches,
            "micro-batches where stages sleep": _ROWS,
        },
    )


def _plan(name: str, model: Llama) -> Plan:
    count = 2 * get_schedule(name).usual_stages
    return Plan(
        name=name,
        axis="pipeline",
        method="pipeline_parallel",
        options={
            "schedule": name,
            "num_micro_batches": MICRO_BATCHES,
            "split_points": [
                f"model.layers.{stage * (model.num_layers // count)}" for stage in range(1, count)
            ],
        },
        by_hand=lambda llama, batch: pipeline_step(llama, batch, MICRO_BATCHES, name),
    )


def _slowed(forward_s: float, backward_s: float, rounds: int) -> list[Block]:
    """On one rank; the number of forward passes tells that all are recomputed that are to be."""
    sides = {name: _step(name, forward_s, backward_s) for name in ("1F1B", *_MERAKS)}
    for name, step in sides.items():
        step()
        before = Slow.num_forwards
        step()
        keeps = get_schedule(name).keeps_last and torch.distributed.get_rank() == _STAGES - 1
        assert Slow.num_forwards - before == _ROWS * (1 if keeps else 2), name
    return measure(sides, _PAIRS, rounds=rounds, calls=1, barrier=barrier)


def _step(schedule: str, forward_s: float, backward_s: float) -> Callable[[], object]:
    batch = torch.ones(_ROWS, SLOW_WIDTH)
    _, result, _ = auto_accelerate(
        nn.Sequential(*(SlowStage(forward_s, backward_s) for _ in range(_STAGES))),
        torch.optim.SGD,
        loss_func=lambda _, output: output.square().mean(),
        optim_args={"lr": 1e-3},
        sample_batch=batch,
        load_strategy=[
            ("parallel_mode", ([("pipeline", _STAGES)], None)),
            (
                "pipeline_parallel",
                {"schedule": schedule, "num_micro_batches": _ROWS, "split_method": "uniform"},
            ),
            ("checkpoint", {"share": 1.0}),
        ],
    )
    assert result is not None
    return lambda: result.train_step(batch)


def _simulated_ms(schedule: str, forward_s: float, backward_s: float) -> float:
    keeps = get_schedule(schedule).keeps_last
    again = tuple(0.0 if keeps and stage == _STAGES - 1 else forward_s for stage in range(_STAGES))
    costs = StageCosts(
        forward=(forward_s,) * _STAGES,
        backward_input=tuple(backward_s + more for more in again),
        backward_weight=(0.0,) * _STAGES,
        recompute=again,
    )
    step = PipelineStep(
        schedule=schedule, num_ranks=_STAGES, num_micro_batches=_ROWS, stages_per_rank=1, costs=costs
    )
    return step.timeline().step_seconds * 1000


def gain_row(blocks: list[Block], name: str, forward_s: float, backward_s: float) -> dict[str, Any]:
    """By how much a schedule's steps are shorter than those of 1F1B beside them, and by how much they should be."""
    base = _simulated_ms("1F1B", forward_s, backward_s)
    simulated = base - _simulated_ms(name, forward_s, backward_s)
    pairs = neighbours(blocks, (name, "1F1B"))
    gains = [(other.wall_s - own.wall_s) * 1000 for own, other in pairs]
    ratio = Spread.of(gain / simulated for gain in gains)
    return {
        "part": "recomputing early",
        "plan": name,
        "step": f"forward {forward_s * 1000:.0f} ms, backward {backward_s * 1000:.0f} ms",
        "pairs": len(gains),
        "wall_ratio": ratio,
        "holds": abs(ratio.median - 1) <= GAIN_TARGET,
        "simulated_ms": simulated,
        "simulated_percent": 100 * simulated / base,
        "measured_ms": Spread.of(gains),
        "base_ms": base,
        "base_measured_ms": spread_of(blocks, "1F1B", lambda block: block.wall_s, scale=1000),
    }
