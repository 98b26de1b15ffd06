"""Overhead: what ``auto_accelerate`` itself takes, against building the same by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from atorch_ns.testing import reserve_port
from benchmarks._building import PLANS, Plan, build_by_hand, build_ours
from benchmarks._llama import SMALL, TINY, Llama
from benchmarks._ranks import barrier, keeping_bytecode, on_ranks
from benchmarks._results import Column, Findings, Spread

__all__ = ["TARGET_S", "run"]

TARGET_S = 0.5
"""The most seconds that ``auto_accelerate`` may add."""

_TEXT = """
Seconds from a plain model to everything that trains (wrapped model, optimizer, data loader), by `auto_accelerate` and
by hand with the same features; the slowest rank's elapsed time. The model is built before the clock starts.

- *warm*: torch, transformers and this package are imported, as in any call but the first of a program; the two sides
  run in turns in the same processes.
- *cold*: fresh interpreters that have imported torch and transformers, joined a process group and built the model,
  but have not yet imported what either side needs: the one call of a program, imports included; one by one, in turns.

*added* is the median of the differences of neighbouring runs with its 95 % confidence interval; it holds below
{target} s.
"""

_COLUMNS = (
    Column(title="features", key="name"),
    Column(title="ranks", key="num_ranks"),
    Column(title="start", key="start"),
    Column(title="by hand s (p25..p75)", key="by_hand_s"),
    Column(title="auto_accelerate s (p25..p75)", key="ours_s"),
    Column(title="added s", key="added_s", confidence=True),
    Column(title="pairs", key="pairs"),
    Column(title="holds", key="holds"),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every plan, warm and cold.

    Args:
        quick: a tiny model and few pairs.
        report: told what is being done.
    """
    model, warm, cold = (TINY, 4, 1) if quick else (SMALL, 20, 5)
    rows = []
    for plan in PLANS:
        report(f"overhead: {plan.name}, warm")
        ranks = on_ranks(_warm, plan.num_ranks, plan, model, warm)
        times = [(max(a), max(b)) for a, b in (tuple(zip(*pair, strict=True)) for pair in zip(*ranks, strict=True))]
        rows.append(_row(plan, "warm", times))
        report(f"overhead: {plan.name}, cold")
        _cold_pair(plan, quick, 0)  # compiles, and brings files into memory
        rows.append(_row(plan, "cold", [_cold_pair(plan, quick, first) for first in range(cold)]))
    return Findings(
        name="overhead",
        title="What auto_accelerate itself takes",
        text=_TEXT.format(target=TARGET_S),
        columns=_COLUMNS,
        rows=rows,
        settings={"model": model.describe()},
    )


def _row(plan: Plan, start: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    added = Spread.of(ours - by_hand for by_hand, ours in pairs)
    return {
        "name": plan.name,
        "strategy": list(plan.strategy),
        "num_ranks": plan.num_ranks,
        "start": start,
        "by_hand_s": Spread.of(by_hand for by_hand, _ in pairs),
        "ours_s": Spread.of(ours for _, ours in pairs),
        "added_s": added,
        "pairs": added.n,
        "holds": added.median < TARGET_S,
    }


def _warm(plan: Plan, model: Llama, rounds: int) -> list[tuple[float, float]]:
    """On one rank: seconds by hand and by ``auto_accelerate``, once a round, in turns first."""
    sides = (build_by_hand, build_ours)
    for side in sides:
        side(plan, model.build())
    found = []
    for number in range(rounds):
        seconds = {}
        for side in sides if number % 2 == 0 else reversed(sides):
            seconds[side] = _clocked(lambda plain, side=side: side(plan, plain), model)
        found.append((seconds[build_by_hand], seconds[build_ours]))
    return found


def _clocked(build: Callable[[nn.Module], object], model: Llama) -> float:
    plain = model.build()
    barrier()
    begin = time.perf_counter()
    kept = build(plain)
    seconds = time.perf_counter() - begin
    del kept
    return seconds


def _cold_pair(plan: Plan, quick: bool, number: int) -> tuple[float, float]:
    sides = ("by_hand", "ours")
    seconds = {side: _cold(plan, side, quick) for side in (sides if number % 2 == 0 else reversed(sides))}
    return seconds["by_hand"], seconds["ours"]


def _cold(plan: Plan, side: str, quick: bool) -> float:
    """The slowest rank's seconds, in fresh interpreters."""
    command = [sys.executable, "-m", "benchmarks._cold", plan.name, side, "quick" if quick else "full"]
    with reserve_port() as port:
        ranks = [
            subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment(plan, rank, port))
            for rank in range(plan.num_ranks)
        ]
        try:
            outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return max(float(json.loads(output.splitlines()[-1])["seconds"]) for output in outputs)


def _environment(plan: Plan, rank: int, port: int) -> dict[str, str]:
    if plan.num_ranks == 1:
        return keeping_bytecode()
    return {
        **keeping_bytecode(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.num_ranks),
        "LOCAL_WORLD_SIZE": str(plan.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
