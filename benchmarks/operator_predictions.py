"""Predictions of operator plans against their runs: does the plan that is predicted to be faster run faster?"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from scipy.stats import spearmanr
from torch.distributed.tensor import Shard

from atorch_ns import auto_accelerate
from atorch_ns.capture.graph.operator_graph import Operator
from atorch_ns.cluster import Cluster, calibrate
from atorch_ns.job import track_memory
from atorch_ns.operators import (
    OperatorPlan,
    OperatorPrices,
    States,
    assemble,
    batch_plan,
    capture_shallow,
    legal_rules,
    random_plan,
    solved_plan,
)
from atorch_ns.operators.rules.rule import Rule
from benchmarks._llama import Llama, random_batch
from benchmarks._ranks import barrier, on_ranks
from benchmarks._results import Column, Findings

__all__ = [
    "LEAST_CORRELATION",
    "MEMORY_SHARE",
    "MODEL",
    "RANKS",
    "calibrated",
    "run",
    "run_plans",
    "sample_batch",
]

LEAST_CORRELATION, MEMORY_SHARE = 0.8, 0.10
RANKS, _TOKENS, _SAMPLES = 4, 128, 8
MODEL = Llama(vocab_size=2048, width=256, hidden=704, num_layers=4)
_CPU = torch.device("cpu")
_TEXT = """
A Llama, its loss inside, is divided over {ranks} gloo ranks by unlike plans: the solver's with and without limits, the samples,
heads alone, a part of a block alone, nothing, and three at random. Speeds of ranks and links are measured first
(`calibrate`). *predicted* and *measured* are of one training step: seconds of the slowest rank, median of {rounds}; MiB at the
peak of the largest. The model's optimizer is priced in memory, not in time, and is as long for plans that divide alike.

- *rank correlation* (Spearman) of predicted and measured seconds: at least {correlation}.
- *within*: predicted memory is within {share:.0%} of measured.
"""
_COLUMNS = (
    Column(title="plan", key="plan"),
    Column(title="predicted s", key="predicted_s", digits=3),
    Column(title="measured s", key="measured_s", digits=3),
    Column(title="predicted MiB", key="predicted_mib", digits=1),
    Column(title="measured MiB", key="measured_mib", digits=1),
    Column(title="within", key="holds"),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Prices every plan, and runs it.

    Args:
        quick: three plans, one step each.
        report: told what is being done.
    """
    rounds = 1 if quick else 9
    report("operator_predictions: measuring ranks and links")
    cluster = on_ranks(calibrated, RANKS)[0]
    priced = _priced(cluster)
    names = list(priced)[: 3 if quick else None]
    report(f"operator_predictions: running {len(names)} plans")
    ran = on_ranks(run_plans, RANKS, [priced[name][0].as_json() for name in names], rounds)
    rows: list[dict[str, Any]] = []
    for place, name in enumerate(names):
        _, seconds, num_bytes = priced[name]
        measured_s = max(rank[place][0] for rank in ran)
        measured = max(rank[place][1] for rank in ran)
        rows.append(
            {
                "plan": name,
                "predicted_s": seconds,
                "measured_s": measured_s,
                "predicted_mib": num_bytes / 2**20,
                "measured_mib": measured / 2**20,
                "holds": abs(num_bytes / measured - 1) <= MEMORY_SHARE,
            }
        )
    correlation = spearmanr(
        [row["predicted_s"] for row in rows], [row["measured_s"] for row in rows]
    ).statistic
    return Findings(
        name="operator_predictions",
        title="Predictions of operator plans",
        text=_TEXT.format(ranks=RANKS, rounds=rounds, correlation=LEAST_CORRELATION, share=MEMORY_SHARE),
        columns=_COLUMNS,
        rows=rows,
        settings={
            "model": MODEL.describe(),
            "batch": f"{_SAMPLES} samples of {_TOKENS} tokens",
            "rank correlation": f"{correlation:.2f}",
        },
    )


def calibrated() -> Cluster:
    """This machine with the speeds of its ranks and links measured; collective."""
    cluster = Cluster.detect()
    return replace(cluster, hardware=calibrate(cluster))


def sample_batch() -> dict[str, torch.Tensor]:
    """Token ids and labels of :data:`MODEL`, [B, T]."""
    ids = random_batch(MODEL, _SAMPLES, _TOKENS, seed=0)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone()}


def _priced(cluster: Cluster) -> dict[str, tuple[OperatorPlan, float, float]]:
    """By name the plans, with predicted seconds and bytes."""
    graph = capture_shallow(MODEL.build(), (), sample_batch(), device=_CPU).graph
    prices, states = OperatorPrices.on(cluster, RANKS, "float32"), States()
    assembled = assemble(graph, legal_rules(graph, RANKS), prices, states, device=_CPU)

    def by_heads(one: Operator, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if one.name == "scaled_dot_product_attention":
            return tuple(rule for rule in rules if rule.inputs[0] == Shard(1))
        return tuple(rule for rule in rules if Shard(0) not in (*rule.inputs[:1], *rule.outputs))

    def solved(**limits: Any) -> OperatorPlan:
        return solved_plan(graph, RANKS, prices, states, device=_CPU, **limits).plan

    heads, free = solved(allow=by_heads), solved()
    least = assembled.price(free).memory
    plans = {
        "solved": free,
        "nothing divided": OperatorPlan(degree=RANKS),
        "random 1": random_plan(graph, RANKS, 1),
        "solved, 90 % of its memory": solved(memory_limit=0.9 * least),
        "solved, 75 % of its memory": solved(memory_limit=0.75 * least),
        "heads alone": heads,
        "samples": batch_plan(graph, RANKS),
        "attention alone": _part(heads, ".self_attn"),
        "feed-forward alone": _part(heads, ".mlp"),
        "random 2": random_plan(graph, RANKS, 2),
        "random 3": random_plan(graph, RANKS, 3),
    }
    found = {name: (plan, assembled.price(plan)) for name, plan in plans.items()}
    return {name: (plan, price.seconds, price.memory) for name, (plan, price) in found.items()}


def _part(plan: OperatorPlan, name: str) -> OperatorPlan:
    """The part of a plan that is of modules with a name."""
    return OperatorPlan(
        operators={key: rule for key, rule in plan.operators.items() if name in key},
        parameters={key: one for key, one in plan.parameters.items() if name in key},
        degree=plan.degree,
    )


def run_plans(plans: list[dict[str, Any]], rounds: int) -> list[tuple[float, float]]:
    """Seconds of a step and bytes at its peak, on one rank."""
    return [_step(plan, rounds) for plan in plans]


def _step(plan: dict[str, Any], rounds: int) -> tuple[float, float]:
    batch = sample_batch()
    gc.collect()
    with track_memory(_CPU) as memory:
        _, result, _ = auto_accelerate(
            MODEL.build(),
            torch.optim.AdamW,
            loss_func=lambda _, output: output.loss,
            model_input_format="unpack_dict",
            sample_batch=batch,
            load_strategy=[
                ("parallel_mode", ([("tensor", RANKS)], None)),
                ("operator_parallel", {"plan": plan, "self_test": False}),
            ],
        )
        assert result is not None
        for _ in range(2):
            result.train_step(batch)
        gc.collect()
        memory.reset_peak()
        result.train_step(batch)
        peak = memory.peak_bytes
    seconds = []
    for _ in range(rounds):
        barrier()
        begun = time.perf_counter()
        result.train_step(batch)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), float(peak)
