"""Overhead: what ``auto_accelerate`` itself takes, against building the same by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atorch_ns.testing import reserve_port
from benchmarks._building import PLANS, Plan, build_by_hand, build_ours
from benchmarks._llama import SMALL, TINY, Llama
from benchmarks._ranks import barrier, keeping_bytecode, on_ranks
from benchmarks._results import Column, Findings, Spread
from benchmarks._yardstick import WORDS, in_yardsticks

__all__ = ["TARGET", "run"]

TARGET = 8.0
"""The most yardsticks that ``auto_accelerate`` may add."""

_TEXT = """
Seconds from a plain model to everything that trains (wrapped model, optimizer, data loader), by `auto_accelerate` and
by hand with the same features; of the slowest rank. The model is built before the clock starts.

- *warm*: torch, transformers and this package are imported, as in any call but the first of a program; the two sides
  run in turns in the same processes.
- *cold*: fresh interpreters that have imported torch and transformers, joined a process group and built the model,
  but have not yet imported what either side needs: the one call of a program, imports included; one by one, in turns.
- *cpu*: processor time, which other programs on the machine do not change much; *wall*: elapsed time.

*added* is the median of the differences of neighbouring runs with its 95 % confidence interval; it holds if the
processor time added is below {target:.0f} yardsticks: {yardstick}.
"""

_COLUMNS = (
    Column(title="features", key="name"),
    Column(title="ranks", key="num_ranks"),
    Column(title="start", key="start"),
    Column(title="pairs", key="pairs"),
    Column(title="by hand, cpu s (p25..p75)", key="by_hand_cpu_s"),
    Column(title="auto_accelerate, cpu s (p25..p75)", key="ours_cpu_s"),
    Column(title="added, cpu s", key="added_cpu_s", confidence=True),
    Column(title="yardsticks", key="yardsticks", digits=1),
    Column(title="added, wall s", key="added_wall_s", confidence=True),
    Column(title="holds", key="holds"),
)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What one run took, elapsed and of the processor."""

    wall: float
    cpu: float


Turn = dict[str, Seconds]
"""One run of each side, by name."""

_SIDES = {"by_hand": build_by_hand, "ours": build_ours}


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
        rows.append(_row(plan, "warm", [_slowest(turns) for turns in zip(*ranks, strict=True)]))
        report(f"overhead: {plan.name}, cold")
        _cold_turn(plan, quick, 0)  # compiles, and brings files into memory
        rows.append(_row(plan, "cold", [_cold_turn(plan, quick, number) for number in range(cold)]))
    return Findings(
        name="overhead",
        title="What auto_accelerate itself takes",
        text=_TEXT.format(target=TARGET, yardstick=WORDS),
        columns=_COLUMNS,
        rows=rows,
        settings={"model": model.describe()},
    )


def _slowest(ranks: Sequence[Turn]) -> Turn:
    return {
        side: Seconds(wall=max(turn[side].wall for turn in ranks), cpu=max(turn[side].cpu for turn in ranks))
        for side in _SIDES
    }


def _row(plan: Plan, start: str, turns: Sequence[Turn]) -> dict[str, Any]:
    added_cpu = Spread.of(turn["ours"].cpu - turn["by_hand"].cpu for turn in turns)
    return {
        "name": plan.name,
        "strategy": list(plan.strategy),
        "num_ranks": plan.num_ranks,
        "start": start,
        "pairs": len(turns),
        **{f"{side}_cpu_s": Spread.of(turn[side].cpu for turn in turns) for side in _SIDES},
        **{f"{side}_wall_s": Spread.of(turn[side].wall for turn in turns) for side in _SIDES},
        "added_cpu_s": added_cpu,
        "added_wall_s": Spread.of(turn["ours"].wall - turn["by_hand"].wall for turn in turns),
        "yardsticks": in_yardsticks(added_cpu.median),
        "holds": in_yardsticks(added_cpu.median) < TARGET,
    }


def _in_turns(number: int) -> Iterable[str]:
    return _SIDES if number % 2 == 0 else reversed(_SIDES)


def _warm(plan: Plan, model: Llama, rounds: int) -> list[Turn]:
    """On one rank: both sides once a round, in turns first."""
    for build in _SIDES.values():
        build(plan, model.build())
    return [{side: _clocked(plan, side, model) for side in _in_turns(number)} for number in range(rounds)]


def _clocked(plan: Plan, side: str, model: Llama) -> Seconds:
    plain = model.build()
    barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    kept = _SIDES[side](plan, plain)
    seconds = Seconds(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)
    del kept
    return seconds


def _cold_turn(plan: Plan, quick: bool, number: int) -> Turn:
    return {side: _cold(plan, side, quick) for side in _in_turns(number)}


def _cold(plan: Plan, side: str, quick: bool) -> Seconds:
    """In fresh interpreters."""
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
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return Seconds(wall=max(rank["wall"] for rank in found), cpu=max(rank["cpu"] for rank in found))


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
