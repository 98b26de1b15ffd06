"""Published training runs: predicted by ``atorch_ns.planning`` alone, beside what others measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.errors import AtorchError
from atorch_ns.estimate.intervals import class_of, residual, residuals
from atorch_ns.planning import estimate, profile
from atorch_ns.profile import Profile
from atorch_ns.strategy import Strategy
from benchmarks._published.residuals import measured_residuals, published_residuals, write
from benchmarks._published.runs import Run, read
from benchmarks._results import Column, Findings

__all__ = ["run"]

_TEXT = """
Training runs that others measured and published (`benchmarks/_published/runs.csv` and `runs_2026.csv`, each with its source), predicted from
the model's configuration on the meta device, a strategy and a cluster, by `atorch_ns.planning` alone. No constant of the
estimate was fitted to them, and nothing was run. Ratios are predicted over published. *GiB published* is what the source
counts, and so are predictions: reserved by torch where it says so, else allocated. *in memory*: a run that ran is predicted
within what its device has, tensors and what lies outside of torch, by the lower end of the interval. *between*: the interval of
its class, by all runs. *stands for*: what no method here says, and what was taken instead; notes on the sources stand in
the CSV file. Rows without a prediction say why. Tables by source, device and option: [docs/benchmarks.md](../../docs/benchmarks.md).
"""

_COLUMNS = (
    Column(title="run", key="run"),
    Column(title="model", key="model"),
    Column(title="cluster", key="cluster"),
    Column(title="batch", key="batch"),
    Column(title="strategy", key="strategy"),
    Column(title="s published", key="published_s"),
    Column(title="s predicted", key="predicted_s"),
    Column(title="between", key="seconds_between"),
    Column(title="ratio", key="time_ratio", digits=2),
    Column(title="GiB published", key="published_gib", digits=1),
    Column(title="GiB predicted", key="predicted_gib", digits=1),
    Column(title="between", key="gib_between"),
    Column(title="ratio", key="memory_ratio", digits=2),
    Column(title="in memory", key="within_memory"),
    Column(title="stands for", key="substitutes"),
    Column(title="no prediction", key="missing"),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Predicts every run, and writes the intervals of predictions that follow (``atorch_ns/estimate/residuals.csv``).

    Args:
        quick: the smallest model's alone, and writes no intervals.
        report: told what is being done.
    """
    runs = [each for each in read() if not quick or each["source"] == "litgpt"]
    profiles: dict[tuple[str, ...], Profile] = {}
    rows: list[Mapping[str, Any]] = []
    for number, each in enumerate(runs, 1):
        report(f"published: {number} of {len(runs)}, {each['id']}")
        rows.append(_row(each, profiles))
    if not quick:
        write({**published_residuals(rows), **measured_residuals()})
        residuals.cache_clear()
    rows = [_with_intervals(row) for row in rows]
    return Findings(
        name="published",
        title="Published training runs",
        text=_TEXT,
        columns=_COLUMNS,
        rows=rows,
        settings={"runs": len(runs), "profiles": len(profiles)},
    )


def _row(each: Run, profiles: dict[tuple[str, ...], Profile]) -> Mapping[str, Any]:
    row: dict[str, Any] = {
        "run": each["id"],
        "source": each["source"],
        "address": each["url"],
        "device": each["gpu"],
        "options": each.options,
        "model": each.model,
        "cluster": each.cluster,
        "batch": each.number("global_batch"),
        "published_s": each.step_seconds,
        "tokens_per_device": each.tokens_per_device,
        "published_gib": each.peak_gib,
        "memory_kind": each["memory_kind"],
        "missing": each.missing,
    }
    if each.missing:
        return row
    strategy = Strategy.load(each.strategy)
    row |= {"strategy": str(strategy), "substitutes": "; ".join(each.substitutes)}
    if each.architecture not in profiles:
        profiles[each.architecture] = profile(each.build(), each.sample())
    cluster = cluster_from_spec(each.cluster)
    try:
        found, kept = (
            estimate(profiles[each.architecture], steps, cluster, batch=each.number("global_batch"))
            for steps in (each.strategy, each.strategy_of_memory)
        )
    except AtorchError as error:
        return {**row, "missing": " ".join(str(error).split())}
    assert cluster.hardware is not None
    counted = kept.reserved_bytes if each["memory_kind"].startswith("reserved") else kept.allocated_bytes
    gib = counted / 2**30
    return {
        **row,
        "class": class_of(cluster.hardware.device, profiles[each.architecture]),
        "predicted_s": found.step_seconds,
        "predicted_gib": gib,
        "peak_at": kept.peak_at,
        "time_ratio": found.step_seconds / each.step_seconds if each.step_seconds else None,
        "memory_ratio": gib / each.peak_gib if each.peak_gib else None,
        "needed_gib": kept.least_bytes / 2**30,
        "device_gib": cluster.device_memory_bytes / 2**30,
    }


def _with_intervals(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its intervals in words, and whether it is predicted to fit by the lower end of that of memory."""
    if "class" not in row:
        return row
    time, memory = (
        residual(residuals(), quantity, row["class"]).range for quantity in ("step time", "memory")
    )
    seconds, gib = (
        [factor * row["predicted_s"] for factor in time],
        [factor * row["predicted_gib"] for factor in memory],
    )
    return {
        **row,
        "seconds_between": f"{seconds[0]:.3g} to {seconds[1]:.3g}",
        "gib_between": f"{gib[0]:.3g} to {gib[1]:.3g}",
        "within_memory": memory[0] * row["needed_gib"] <= row["device_gib"],
    }
