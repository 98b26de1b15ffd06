"""Estimate of memory: predicted bytes against those that a rank really holds, for every strategy of the parity table."""

from __future__ import annotations

import gc
import importlib.util
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import Workload
from atorch_ns.estimate.memory.peak import plan_group, price_memory
from atorch_ns.estimate.memory.states import KeptBytes
from atorch_ns.estimate.model_shard import Memo, reported_bytes
from atorch_ns.estimate.stages import shard_stages
from atorch_ns.estimate.table import PlanTable
from atorch_ns.job import PeakMemory
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Profile, Trace, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing.parity import ADAMW, accelerate_case
from benchmarks._memory_cases import LAYOUTS, MIXTURES, SIZED_CASES, SizedCase, axes_of, sized_case
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings
from benchmarks._storages import measure_peak
from tests.parity.variants import BACKENDS, TRIPLES, VARIANTS, Variant, package_of, pairs_from, partners

__all__ = [
    "MEDIAN_LIMIT",
    "NUM_RANKS",
    "WORST_LIMIT",
    "combinations",
    "compare",
    "describe",
    "held",
    "kept_by",
    "measured",
    "plan_of",
    "profile_of",
    "run",
]

NUM_RANKS = 2
MEDIAN_LIMIT = 0.03
"""Half of all predictions are at most this far off."""
WORST_LIMIT = 0.08
"""No prediction is further off."""

_NUM_STEPS = 6
_QUICK_CASES = ("mlp, small", "llama, small")
_QUICK_STRIDE = 14
"""Of the combinations, every how many-th a quick run measures."""
_TEXT = """
How far the predicted peak of tensor bytes is from the measured one, in per cent of the measured one, on {num_ranks}
ranks (the rank that holds most), and of four mixtures of experts on 2, 4 and 8. Predicted from a trace on fake tensors of the model; measured by following torch's
allocator through whole training steps: parameters, gradients, optimizer states, activations, buffers of collectives
and workspaces, whoever allocates them. Each model has two sizes. *states*: parameters, gradients and optimizer states
that are kept after a step are predicted to the byte. Asked for: a median of at most {median:.0%}, no more than
{worst:.0%} in any row. Measured here over all: median {found_median:.2%}, worst {found_worst:.2%}.
"""


def combinations(quick: bool = False) -> list[tuple[Variant, ...]]:
    """Every method alone, every legal pair and some triples, with every backend that is installed."""
    registry = load_registry()
    found: list[tuple[Variant, ...]] = []
    for variant in VARIANTS:
        found += pairs_from(registry, variant)
    for backend in BACKENDS:
        package = package_of(backend)
        if package is None or importlib.util.find_spec(package) is not None:
            found += partners(registry, backend)
    found += TRIPLES
    return found[::_QUICK_STRIDE] if quick else found


def measured(name: str, strategies: Sequence[Any]) -> list[PeakMemory]:
    """On one rank: what each strategy holds."""
    return held(sized_case(name), strategies)


def held(sized: SizedCase, strategies: Sequence[Any]) -> list[PeakMemory]:
    """On one rank, with or without a process group: what each strategy holds."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = []
    for strategy in strategies:
        axes = axes_of(strategy)
        parts = math.prod(axes.get(name, 1) for name in ("data", "zero", "expert")) if axes else num_ranks
        per_rank = sized.global_batch // parts

        def batches(per_rank: int = per_rank, parts: int = parts) -> Iterator[Any]:
            for step in range(_NUM_STEPS):
                # Ranks that hold parts of the model get the same samples.
                yield sized.case.make_batch(per_rank, num_ranks * step + rank * (parts == num_ranks))

        def make(strategy: Any = strategy, per_rank: int = per_rank, axes: Any = axes) -> Any:
            sample = {"sample_batch": sized.case.make_batch(per_rank, 0)} if axes else {}
            return accelerate_case(sized.case, strategy, dataset=None, dataloader_args=None, **sample)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(measure_peak(make, batches()))
        gc.collect()
    return found


def profile_of(sized: SizedCase, num_ranks: int = NUM_RANKS, model: nn.Module | None = None) -> Profile:
    """Structure and trace of the model, the case's own unless given, with the optimizer that trains it."""
    case = sized.case
    return profile_model(
        case.build() if model is None else model,
        case.make_batch(sized.global_batch // num_ranks, 0),
        lambda model, batch: case.loss_func(batch, case.call(model, batch)),
        find_dims,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, **ADAMW),
    )


def plan_of(strategy: Any, profile: Profile, num_ranks: int = NUM_RANKS) -> Plan:
    """What a strategy decides on CPU ranks."""
    cluster = replace(
        Cluster.detect(), world_size=num_ranks, local_world_size=num_ranks, distributed=num_ranks > 1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resolve(Strategy.load(strategy), cluster, load_registry(), profile=profile).plan


def kept_by(plan: Plan, trace: Trace, workload: Workload) -> KeptBytes:
    """Bytes of states on every kind of rank of a plan."""
    memo = Memo()
    _, sizes = PlanTable.of([plan]).sizes(0, workload, memo)
    parts, _ = shard_stages(trace, sizes, memo)
    return plan_group(plan, trace, workload, parts, device_type="cpu", memo=memo).kept


def _gradients_are_buckets(plan: Plan) -> bool:
    views = plan.gradient_sync == "all_reduce" and plan.sharding.bucket_views == "always"
    return views and plan.precision.master_dtype is None


def compare(
    sized: SizedCase, strategies: Sequence[Any], ranks: Sequence[Sequence[PeakMemory]], profile: Profile
) -> list[dict[str, Any]]:
    """For each strategy what was predicted and what was measured, in bytes, on the rank that holds most."""
    assert profile.trace is not None
    plans = [plan_of(strategy, profile, num_ranks=len(ranks)) for strategy in strategies]
    workload = Workload(global_batch=sized.global_batch, num_tokens=sized.num_tokens)
    memory, at, moments = price_memory(PlanTable.of(plans), profile.trace, workload, device_type="cpu")
    rows = []
    for index, plan in enumerate(plans):
        seen = [rank[index] for rank in ranks]
        kept = kept_by(plan, profile.trace, workload)
        predicted = float(memory[index].sum())
        peak = max(one.peak_bytes for one in seen)
        states = {name: int(getattr(kept, name).max()) for name in ("parameters", "gradients", "optimizer")}
        if _gradients_are_buckets(plan):  # whose storage has what ranks report as well
            states["gradients"] += reported_bytes(plan, profile.trace)
        true_states = {name: max(getattr(one.states, name) for one in seen) for name in states}
        rows.append(
            {
                "case": sized.name,
                "predicted_bytes": predicted,
                "measured_bytes": peak,
                "error": predicted / peak - 1,
                "at": moments[at[index]],
                "predicted_states": states,
                "measured_states": true_states,
            }
        )
    return rows


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every strategy on every model of every size.

    Args:
        quick: some strategies on two small models.
        report: told what is being done.
    """
    chosen = combinations(quick)
    strategies = [[(variant.name, variant.config) for variant in variants] for variants in chosen]
    labels = [" + ".join(variant.label for variant in variants) for variants in chosen]
    rows: list[dict[str, Any]] = [{"name": label, "states": True, "details": []} for label in labels]
    cases = [sized for sized in SIZED_CASES if not quick or sized.name in _QUICK_CASES]
    for sized in cases:
        report(f"estimate_memory: {len(chosen)} strategies on {sized.name}")
        profile = profile_of(sized)
        # Strategies that decide the same (a default written out, say) are measured once.
        plans = [plan_of(strategy, profile) for strategy in strategies]
        first = {plan: index for index, plan in reversed(list(enumerate(plans)))}
        distinct = [strategies[index] for index in first.values()]
        ranks = on_ranks(measured, NUM_RANKS, sized.name, distinct, timeout_s=3600.0)
        details = dict(zip(first, compare(sized, distinct, ranks, profile), strict=True))
        for row, plan in zip(rows, plans, strict=True):
            detail = details[plan]
            row[sized.name] = 100 * detail["error"]
            row["states"] &= detail["predicted_states"] == detail["measured_states"]
            row["details"].append(detail)
    for num_ranks, layouts in LAYOUTS.items():
        if not quick:
            rows += _mixture_rows(num_ranks, layouts, report)
    cases += [] if quick else MIXTURES
    errors = {sized.name: [abs(row[sized.name]) for row in rows if sized.name in row] for sized in cases}
    every = [error for of_case in errors.values() for error in of_case]
    summary = [
        {"name": "median of the sizes of errors", **{k: statistics.median(v) for k, v in errors.items()}},
        {"name": "worst", **{k: max(v) for k, v in errors.items()}},
    ]
    return Findings(
        name="estimate_memory",
        title="Predicted and measured memory",
        text=_TEXT.format(
            num_ranks=NUM_RANKS,
            median=MEDIAN_LIMIT,
            worst=WORST_LIMIT,
            found_median=statistics.median(every) / 100,
            found_worst=max(every) / 100,
        ),
        columns=(
            Column(title="strategy", key="name"),
            *(Column(title=f"{sized.name} %", key=sized.name, digits=2) for sized in cases),
            Column(title="states", key="states"),
        ),
        rows=[*summary, *rows],
        settings={"models": {sized.name: describe(sized) for sized in cases}},
    )


def _mixture_rows(
    num_ranks: int, layouts: Sequence[list[Any]], report: Callable[[str], object]
) -> list[dict[str, Any]]:
    rows = [{"name": _layout_text(layout), "states": True, "details": []} for layout in layouts]
    for sized in MIXTURES:
        report(f"estimate_memory: {len(layouts)} layouts of {sized.name} on {num_ranks} ranks")
        sized.case.build()  # imports what ranks would
        ranks = on_ranks(measured, num_ranks, sized.name, layouts, timeout_s=3600.0)
        found = compare(sized, layouts, ranks, profile_of(sized, num_ranks))
        for row, detail in zip(rows, found, strict=True):
            row[sized.name] = 100 * detail["error"]
            row["states"] &= detail["predicted_states"] == detail["measured_states"]
            row["details"].append(detail)
    return rows


def _layout_text(layout: Sequence[Any]) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in axes_of(layout).items())
    methods = [step if isinstance(step, str) else ":".join(map(str, step)) for step in layout[1:]]
    return " + ".join([axes, *methods])


def describe(sized: SizedCase) -> str:
    """The size in words."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in sized.case.build().parameters())
    tokens = f" of {sized.num_tokens} tokens" if sized.num_tokens > 1 else ""
    return f"{count / 1e6:.2f} M parameters and {sized.global_batch} samples{tokens}"
