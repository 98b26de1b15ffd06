"""Timing in pairs: two things run one right after the other, in turns first, and only their ratio counts.

A shared machine slows down and speeds up by tens of per cent over minutes; what runs next to each other is
slowed alike. In a comparison of a with b the order is a b, b a, a b, …, so that neither profits from its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks._results import Spread

__all__ = ["Block", "Pair", "combine", "measure", "neighbours", "ratios", "schedule", "spread_of"]

Pair = tuple[str, str]
"""Names of the two sides: the one in question, and the one it is held against."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One timed run of one side.

    Attributes:
        pair: the comparison it belongs to.
        side: the name of what ran.
        wall_s: elapsed seconds.
        cpu_s: seconds of processor time, of all threads of the process.
    """

    pair: Pair
    side: str
    wall_s: float
    cpu_s: float


def schedule(pairs: Sequence[Pair], rounds: int) -> Iterator[tuple[Pair, str]]:
    """What runs when: every comparison once a round, its first side first in even rounds, last in odd ones."""
    for number in range(rounds):
        for pair in pairs:
            for side in pair if number % 2 == 0 else reversed(pair):
                yield pair, side


def measure(
    sides: Mapping[str, Callable[[], object]],
    pairs: Sequence[Pair],
    *,
    rounds: int,
    calls: int,
    barrier: Callable[[], object],
    cpu_clock: Callable[[], float] = time.process_time,
) -> list[Block]:
    """Runs the schedule and times every block.

    Args:
        sides: what to run, by name.
        pairs: the comparisons.
        rounds: how often each is made.
        calls: how often a side is called in one block.
        barrier: called before every block; makes the ranks begin together.
        cpu_clock: seconds of processor time spent so far; by default by this process.
    """
    blocks = []
    for pair, side in schedule(pairs, rounds):
        run = sides[side]
        barrier()
        wall, cpu = time.perf_counter(), cpu_clock()
        for _ in range(calls):
            run()
        cpu_s, wall_s = cpu_clock() - cpu, time.perf_counter() - wall
        blocks.append(Block(pair=pair, side=side, wall_s=wall_s, cpu_s=cpu_s))
    return blocks


def combine(ranks: Sequence[Sequence[Block]]) -> list[Block]:
    """One list from those of all ranks: the slowest rank's elapsed time, everybody's processor time."""
    return [
        Block(
            pair=together[0].pair,
            side=together[0].side,
            wall_s=max(block.wall_s for block in together),
            cpu_s=sum(block.cpu_s for block in together),
        )
        for together in zip(*ranks, strict=True)
    ]


def ratios(blocks: Sequence[Block], pair: Pair, clock: Callable[[Block], float]) -> list[float]:
    """Of every neighbouring pair of blocks, the first side's time over the second side's."""
    return [clock(first) / clock(second) for first, second in neighbours(blocks, pair)]


def neighbours(blocks: Sequence[Block], pair: Pair) -> Iterator[tuple[Block, Block]]:
    """Every neighbouring pair of blocks, the first side's and the second side's."""
    own = [block for block in blocks if block.pair == pair]
    for one, other in zip(own[::2], own[1::2], strict=True):
        yield (one, other) if one.side == pair[0] else (other, one)


def spread_of(blocks: Sequence[Block], side: str, clock: Callable[[Block], float], *, scale: float) -> Spread:
    """All times of one side, multiplied by ``scale``."""
    return Spread.of(clock(block) * scale for block in blocks if block.side == side)
