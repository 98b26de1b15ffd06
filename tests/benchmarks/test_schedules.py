"""The benchmark of pipeline schedules: what it holds gains to."""

from __future__ import annotations

import pytest

from benchmarks._pairs import Block
from benchmarks.schedules import gain_row


def _blocks(name: str, *walls: tuple[float, float]) -> list[Block]:
    pair = (name, "1F1B")
    return [
        Block(pair=pair, side=side, wall_s=wall_s, cpu_s=0.0)
        for walls_s in walls
        for side, wall_s in zip(pair, walls_s, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "gain_ms"),
    [("PreRecompute1F1B", 60), ("LastNoRecompute1F1B", 100), ("ShiftedCriticalPath", 120)],
)
def test_a_gain_is_held_to_the_simulated_one(name: str, gain_ms: float) -> None:
    """Of 11 turns of a forward, a backward and a forward pass again; three of those are early, and more in the last stage."""
    walls = [(1.0 - gain_ms / 1000, 1.0), (2.0 - 1.08 * gain_ms / 1000, 2.0)]
    row = gain_row(_blocks(name, *walls), name, 0.02, 0.04)
    assert row["simulated_ms"] == pytest.approx(gain_ms)
    assert row["base_ms"] == pytest.approx(880)
    assert row["measured_ms"].median == pytest.approx(1.04 * gain_ms)
    assert row["holds"]
    assert not gain_row(_blocks(name, (1.0, 1.05)), name, 0.02, 0.04)["holds"]
