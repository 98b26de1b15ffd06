"""Peers: a step, its memory and its set-up under ``auto_accelerate`` and under what others offer for the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.job import track_memory
from atorch_ns.testing.workers import WorkerFailure
from benchmarks._llama import SMALL, TINY, Llama
from benchmarks._pairs import Block, Pair, combine, measure, ratios, spread_of
from benchmarks._peers import PEERS
from benchmarks._peers._peer import AUTOMATIC, NUM_RANKS, TASKS, Peer, Task, Trainer
from benchmarks._peers.ours import OURS
from benchmarks._ranks import barrier, on_ranks
from benchmarks._results import Column, Findings, Spread

__all__ = ["SET_UP_TARGET", "TARGET", "run", "verdict"]

TARGET = 1.02
"""The largest ratio of a step to the same step by hand."""
SET_UP_TARGET = 1.1
"""The largest ratio of a set-up to the same by hand."""

_NUM_TOKENS = 128
_NUM_LOSSES = 5
_WARM_UP = 3
_NUM_QUICK = 2
"""Peers of a quick run."""
_MIB = 2**20

_TEXT = """
One model, one batch, one optimizer (AdamW), {ranks} processes: `auto_accelerate` beside what others offer for the same
features. *torch by hand* is DDP, `fully_shard`, `ZeroRedundancyOptimizer` and `checkpoint`; *Accelerate* and *DeepSpeed*
run in this environment, *ATorch* 0.2.5 in one of its own, in processes that are driven in the same turns.
Everyone's defaults stand: ours are torch's fused kernels of AdamW where parameters allow them, the others' are not.

- *cpu*, *wall*: the time of our step over the peer's, below 1 where we are faster. Steps run in turns, a b, b a, …;
  each ratio is of two neighbours; medians with their 95 % confidence interval. *cpu* is processor time of all ranks,
  *wall* the slowest rank's elapsed time.
- *we are*: faster or slower where the whole interval of the cpu ratio lies on one side of 1; otherwise equal.
- *loss apart*: the largest difference of the mean losses of the first {losses} steps; *same* where it is within
  1e-4, or 2e-2 with bf16. A row that is not the same compares two different things.
- *peak MiB*: the most bytes of tensors alive in a step, of the rank that holds most, ours and the peer's.
- *set-up*: from the plain model to the end of the first step, in fresh processes that start in turns, what was imported
  before left out; ours over the peer's, with the range of all pairs' ratios, and the middle seconds of both.
- *a strategy found automatically*: what happens to a peer's own search, where it has one.
"""

_COLUMNS = (
    Column(title="features", key="task"),
    Column(title="peer", key="peer"),
    Column(title="we are", key="verdict"),
    Column(title="cpu ratio", key="cpu_ratio", confidence=True),
    Column(title="wall ratio", key="wall_ratio", confidence=True),
    Column(title="pairs", key="pairs"),
    Column(title="peer's step, wall ms", key="wall_ms_peer", digits=0),
    Column(title="same", key="same"),
    Column(title="loss apart", key="loss_apart", digits=6),
    Column(title="peak MiB, ours", key="peak_mib", digits=1),
    Column(title="peak MiB, peer", key="peak_mib_peer", digits=1),
    Column(title="set-up ratio", key="setup_ratio", digits=2, confidence=True),
    Column(title="set-up s, ours", key="setup_s", digits=2),
    Column(title="set-up s, peer", key="setup_s_peer", digits=2),
    Column(title="does not run, since", key="error"),
)


@dataclass(frozen=True, kw_only=True)
class _Size:
    """How much is measured."""

    model: Llama
    num_tokens: int
    set_ups: int
    launches: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class _Start:
    """One side's first steps in fresh processes: the mean of the ranks' losses, and the worst rank's seconds of the first."""

    losses: tuple[float, ...]
    setup_s: float


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every task with every peer that can do it.

    Args:
        quick: one task, a tiny model, the peers that start at once.
        report: told what is being done.
    """
    size = (
        _Size(model=TINY, num_tokens=16, set_ups=1, launches=1, rounds=2)
        if quick
        else _Size(model=SMALL, num_tokens=_NUM_TOKENS, set_ups=5, launches=3, rounds=8)
    )
    _import_early(size.model)
    peers = PEERS[:_NUM_QUICK] if quick else PEERS
    missing = {peer.name: peer.prepare() for peer in peers}
    rows = []
    for task in TASKS[:1] if quick else (*TASKS, AUTOMATIC):
        our_peak = _peak_bytes(OURS, task, size)
        for peer in peers:
            report(f"peers: {task.name}: {peer.name}")
            reason = missing[peer.name] or peer.lacks.get(task.name)
            found = {"error": reason} if reason else _compared(our_peak, peer, task, size)
            rows.append({"task": task.name, "peer": peer.name, **found})
    return Findings(
        name="peers",
        title="Beside others",
        text=_TEXT.format(ranks=NUM_RANKS, losses=_NUM_LOSSES),
        columns=_COLUMNS,
        rows=rows,
        settings={
            "model": size.model.describe(),
            "batch": f"{size.num_tokens} tokens a sample; 2 samples a process, 4 with bf16",
            "starts": size.launches,
        },
    )


def _import_early(model: Llama) -> None:
    """Lets this process import what every rank would: the model's code, and what a first optimizer brings."""
    torch.optim.AdamW(model.build("meta").parameters())


def verdict(ratio: Spread) -> str:
    """What a ratio of our time to another's says."""
    if ratio.high < 1:
        return "faster"
    return "slower" if ratio.low > 1 else "equal"


def _compared(our_peak: int | None, peer: Peer, task: Task, size: _Size) -> dict[str, Any]:
    """A row; where the peer fails, with the reason."""
    sides = (OURS, peer)
    try:
        # The peer first: what fails does so at once.
        orders = [sides[::-1] if number % 2 == 0 else sides for number in range(size.set_ups)]
        starts = [{side.name: _start(side, task, size) for side in order} for order in orders]
        peak = _peak_bytes(peer, task, size)
        blocks: list[Block] = []
        for launch in range(size.launches):
            blocks += combine(on_ranks(_in_turns, NUM_RANKS, peer, task, size, launch))
    except WorkerFailure as failure:
        return {"error": _reason(failure)}
    pair = (OURS.name, peer.name)
    cpu = Spread.of(ratios(blocks, pair, lambda block: block.cpu_s))
    ours, theirs = ([start[side.name] for start in starts] for side in sides)
    setup = Spread.of(one.setup_s / other.setup_s for one, other in zip(ours, theirs, strict=True))
    apart = max(abs(one - other) for one, other in zip(ours[0].losses, theirs[0].losses, strict=True))
    return {
        "verdict": verdict(cpu),
        "cpu_ratio": cpu,
        "wall_ratio": Spread.of(ratios(blocks, pair, lambda block: block.wall_s)),
        "pairs": cpu.n,
        "wall_ms_peer": spread_of(blocks, peer.name, lambda block: block.wall_s, scale=1000),
        "losses": list(ours[0].losses),
        "losses_peer": list(theirs[0].losses),
        "loss_apart": apart,
        "same": apart <= task.loss_tolerance,
        "peak_mib": _mib(our_peak),
        "peak_mib_peer": _mib(peak),
        "setup_ratio": setup,
        "setup_s": statistics.median(one.setup_s for one in ours),
        "setup_s_peer": statistics.median(one.setup_s for one in theirs),
        "holds": cpu.median <= TARGET,
    }


def _mib(size: int | None) -> float | None:
    return None if size is None else size / _MIB


def _reason(failure: WorkerFailure) -> str:
    """The first line of what the first rank to fail said."""
    raised = [one for one in failure.outcomes if one.status in ("raised", "died", "timed_out")]
    first = min(raised, key=lambda one: one.seconds)
    message = (first.message or first.status).strip().splitlines()[0]
    return f"{first.error_type or first.status}: {message}"[:200].replace("|", "/")


def _start(peer: Peer, task: Task, size: _Size) -> _Start:
    ranks = on_ranks(_first_steps, NUM_RANKS, peer, task, size)
    losses = zip(*(losses for losses, _ in ranks), strict=True)
    return _Start(
        losses=tuple(statistics.fmean(one) for one in losses), setup_s=max(seconds for _, seconds in ranks)
    )


def _peak_bytes(peer: Peer, task: Task, size: _Size) -> int | None:
    """Of the worst rank; ``None`` where it cannot be counted."""
    return max(on_ranks(_peak, NUM_RANKS, peer, task, size)) if peer.tracks_memory else None


def _first_steps(peer: Peer, task: Task, size: _Size) -> tuple[list[float], float]:
    """On one rank: the first losses, and the seconds until the first step was done."""
    build = peer.start(task, size.model, size.num_tokens, dist.get_rank())
    barrier()
    started = time.perf_counter()
    trainer = build()
    first = trainer.step()
    seconds = time.perf_counter() - started
    return [first, *(trainer.step() for _ in range(_NUM_LOSSES - 1))], seconds


def _peak(peer: Peer, task: Task, size: _Size) -> int:
    """On one rank: bytes of tensors at the peak of a step, the lowest of three once states are there."""
    peaks = []
    peer.start(task, TINY, 8, dist.get_rank())  # what is imported is not counted
    with track_memory(torch.device("cpu")) as memory:
        trainer = peer.start(task, size.model, size.num_tokens, dist.get_rank())()
        for number in range(_WARM_UP + 3):
            memory.reset_peak()
            trainer.step()
            if number >= _WARM_UP:
                peaks.append(memory.peak_bytes)
    return min(peaks)


def _in_turns(peer: Peer, task: Task, size: _Size, launch: int) -> Sequence[Block]:
    """On one rank; which side is built first changes from launch to launch."""
    sides = (OURS, peer) if launch % 2 == 0 else (peer, OURS)
    trainers: dict[str, Trainer] = {
        side.name: side.start(task, size.model, size.num_tokens, dist.get_rank())() for side in sides
    }
    for trainer in trainers.values():
        for _ in range(_WARM_UP):
            trainer.step()
    pair: Pair = (OURS.name, peer.name)
    return measure(
        {name: trainer.step for name, trainer in trainers.items()},
        [pair],
        rounds=size.rounds,
        calls=1,
        barrier=barrier,
        cpu_clock=lambda: time.process_time() + sum(trainer.cpu_s() for trainer in trainers.values()),
    )
