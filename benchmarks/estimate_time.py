"""Step time: predicted from a profile and a calibration, against measured, for many strategies."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from atorch_ns.cluster import Cluster, Hardware, calibrate
from atorch_ns.data import call_model
from atorch_ns.estimate import PlanTable, TimeParts, Workload
from atorch_ns.estimate.time.step import price_time
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Profile, Trace, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing import Case
from atorch_ns.testing.parity import accelerate_case
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings
from benchmarks._time_cases import GLOBAL_BATCH, STRATEGIES, label_of, make_cases

__all__ = ["compare", "rank_correlation", "run"]

_NUM_RANKS = 2
_TEXT = """
Seconds of a training step on {ranks} processes, predicted before anything of the model was run and measured: the
median over steps of the slowest rank. Predictions come from the model's trace on fake tensors and a calibration of a
few seconds on the same ranks. *ratio*: predicted over measured. Rank correlations (Spearman) of the two over all
strategies: {correlations}.
"""
_COLUMNS = (
    Column(title="model", key="model"),
    Column(title="strategy", key="strategy"),
    Column(title="predicted ms", key="predicted_ms", digits=1),
    Column(title="measured ms", key="measured_ms", digits=1),
    Column(title="ratio", key="ratio", digits=2),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every strategy on every model.

    Args:
        quick: one tiny model, some strategies and few steps.
        report: told what is being done.
    """
    rows: list[dict[str, Any]] = []
    correlations = {}
    strategies = STRATEGIES[::6] if quick else STRATEGIES
    for name, case in list(make_cases(quick=quick).items())[: 1 if quick else None]:
        found = compare(case, strategies, num_steps=3 if quick else 8, report=report)
        rows += [{"model": name, **row} for row in found]
        correlations[name] = rank_correlation(
            [row["predicted_ms"] for row in found], [row["measured_ms"] for row in found]
        )
        report(f"estimate_time: {name}: rank correlation {correlations[name]:.3f}")
    shown = ", ".join(f"{name} {value:.3f}" for name, value in correlations.items())
    return Findings(
        name="estimate_time",
        title="Predicted and measured step time",
        text=_TEXT.format(ranks=_NUM_RANKS, correlations=shown),
        columns=_COLUMNS,
        rows=rows,
        settings={"global batch": GLOBAL_BATCH, "ranks": _NUM_RANKS, "rank correlation": correlations},
    )


def compare(
    case: Case, strategies: Sequence[Sequence[Any]], *, num_steps: int, report: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Predicted and measured milliseconds of each strategy that the model can have.

    Args:
        case: the model.
        strategies: as ``load_strategy``.
        num_steps: timed steps of each.
        report: told what is being done.
    """
    report(f"estimate_time: {case.name}: profile and calibration")
    cluster = Cluster(world_size=_NUM_RANKS, local_world_size=_NUM_RANKS, distributed=True)
    hardware: Hardware = on_ranks(_calibration, _NUM_RANKS)[0]
    profile = profile_case(case)
    assert profile.trace is not None
    rows = []
    for strategy in strategies:
        plan = resolve(Strategy(strategy), cluster, load_registry(), profile=profile).plan
        parts = _predict(plan, profile.trace, cluster, hardware)
        label = label_of(strategy)
        measured = statistics.median(on_ranks(_step_seconds, _NUM_RANKS, case, strategy, num_steps)[0])
        report(
            f"estimate_time: {case.name}: {label}: {parts.total * 1e3:.1f} ms, measured {measured * 1e3:.1f}"
        )
        rows.append(
            {
                "strategy": label,
                "predicted_ms": parts.total * 1e3,
                "measured_ms": measured * 1e3,
                "ratio": parts.total / measured,
                **{f"{name}_ms": value * 1e3 for name, value in parts._asdict().items()},
            }
        )
    return rows


def profile_case(case: Case) -> Profile:
    """The trace of a case's training step."""

    def forward_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return case.loss_func(batch, call_model(model, batch, case.model_input_format))

    return profile_model(
        case.build(),
        case.make_batch(GLOBAL_BATCH, 0),
        forward_loss,
        find_dims,
        make_optimizer=torch.optim.AdamW,
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the positions in order of size."""
    ranks = np.stack([np.argsort(np.argsort(values)) for values in (first, second)]).astype(float)
    return float(np.corrcoef(ranks)[0, 1])


def _predict(plan: Plan, trace: Trace, cluster: Cluster, hardware: Hardware) -> TimeParts:
    known = replace(cluster, hardware=hardware)
    workload = Workload(global_batch=GLOBAL_BATCH, num_tokens=trace.num_tokens)
    return TimeParts(*map(float, price_time(PlanTable.of([plan]), trace, known, workload)[0]))


def _calibration() -> Hardware:
    return calibrate(Cluster.detect())


def ready_step(case: Case, strategy: Sequence[Any]) -> Callable[[], object]:
    """On one rank: a step of the case under the strategy, on its first batch."""
    result = accelerate_case(case, list(strategy), steps=1, global_batch=GLOBAL_BATCH)
    assert result.dataloader is not None
    return functools.partial(result.train_step, next(iter(result.dataloader)))


def _step_seconds(case: Case, strategy: Sequence[Any], num_steps: int) -> list[float]:
    """On one rank: seconds of each step, the maximum over ranks."""
    step = ready_step(case, strategy)
    seconds = []
    for number in range(num_steps + 2):
        dist.barrier()
        started = time.perf_counter()
        step()
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(value) for value in slowest]
