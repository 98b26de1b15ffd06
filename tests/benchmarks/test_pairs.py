"""Order and ratios of paired timing."""

from __future__ import annotations

from benchmarks._pairs import Block, combine, measure, ratios, schedule, spread_of

PAIR = ("ours", "by hand")
OTHER = ("again", "by hand")


def _block(side: str, wall_s: float, cpu_s: float = 1.0, pair: tuple[str, str] = PAIR) -> Block:
    return Block(pair=pair, side=side, wall_s=wall_s, cpu_s=cpu_s)


def test_neither_side_always_runs_first() -> None:
    assert [side for _, side in schedule([PAIR], 4)] == ["ours", "by hand", "by hand", "ours"] * 2


def test_comparisons_take_turns() -> None:
    assert [pair for pair, _ in schedule([PAIR, OTHER], 2)] == [PAIR, PAIR, OTHER, OTHER] * 2


def test_every_block_runs_its_side_and_begins_with_a_barrier() -> None:
    seen: list[str] = []
    sides = {side: (lambda side=side: seen.append(side)) for side in ("ours", "by hand", "again")}
    blocks = measure(sides, [PAIR, OTHER], rounds=2, calls=2, barrier=lambda: seen.append("|"))
    assert "".join(side[0] for side in seen) == "|oo|bb|aa|bb|bb|oo|bb|aa"
    assert [block.side for block in blocks] == [side for _, side in schedule([PAIR, OTHER], 2)]


def test_ratios_are_of_neighbours_whatever_their_order() -> None:
    blocks = [_block("ours", 2), _block("by hand", 1), _block("by hand", 2), _block("ours", 6)]
    others = [_block("again", 50, pair=OTHER), _block("by hand", 10, pair=OTHER)]
    assert ratios([*blocks[:2], *others, *blocks[2:]], PAIR, lambda block: block.wall_s) == [2, 3]
    assert ratios(others, OTHER, lambda block: block.wall_s) == [5]


def test_ranks_are_combined_into_slowest_wall_and_total_cpu() -> None:
    (block,) = combine([[_block("ours", 2, 3)], [_block("ours", 5, 4)]])
    assert (block.wall_s, block.cpu_s) == (5, 7)


def test_spread_of_a_side() -> None:
    blocks = [_block("ours", 0.5), _block("by hand", 9), _block("ours", 0.25)]
    spread = spread_of(blocks, "ours", lambda block: block.wall_s, scale=1000)
    assert (spread.n, spread.smallest, spread.largest) == (2, 250, 500)
