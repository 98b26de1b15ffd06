"""The page of all results, and the lines it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import NAMES
from benchmarks._claims import READERS, claims_of
from benchmarks.table import page, read

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
CONTEXT = {
    "measured": "2026-01-01 00:00 UTC",
    "machine": {"cores": 2},
    "versions": {"python": "3.11"},
    "load average (1 min)": {"before": 0.1, "after": 0.2},
}


def _spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.01, "high": median + 0.01}


def _peers(**changes: Any) -> dict[str, Any]:
    row = {
        "task": "DDP",
        "peer": "Accelerate",
        "verdict": "faster",
        "cpu_ratio": _spread(0.9),
        "wall_ratio": _spread(0.8),
        "pairs": 24,
        "same": True,
        "loss_apart": 0.0,
        "peak_mib": 10.0,
        "peak_mib_peer": 10.0,
        "setup_ratio": {**_spread(1.0), "n": 5},
        "setup_s": 1.0,
        "setup_s_peer": 1.0,
        "holds": True,
    }
    settings = {"model": "a Llama"}
    return {"benchmark": "peers", "settings": settings, **CONTEXT, "rows": [{**row, **changes}]}


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read()), (
        "docs/benchmarks.md is not what benchmarks/results say: run `python -m benchmarks.table docs/benchmarks.md`"
    )


def test_every_benchmark_has_a_reader() -> None:
    assert set(READERS) == set(NAMES)


@pytest.mark.parametrize("data", read(), ids=lambda data: data["benchmark"])
def test_a_figure_that_misses_its_bar_is_said_in_words(data: dict[str, Any]) -> None:
    claims = claims_of(data)
    assert claims
    for claim in claims:
        assert claim.holds is None or claim.asked
        assert claim.shortfall or claim.holds is not False


def test_bars_are_those_of_the_benchmarks() -> None:
    from benchmarks import (
        cutting,
        estimate_memory,
        materialise,
        memory,
        model_axes,
        overhead,
        peers,
        schedules,
        speed,
    )

    asked = {data["benchmark"]: {claim.asked for claim in claims_of(data)} for data in read()}
    assert asked["speed"] == {f"≤ {speed.TARGET}"}
    assert asked["model_axes"] == {f"≤ {model_axes.TARGET}", f"≤ {model_axes.OPERATORS_TARGET}"}
    assert asked["schedules"] == {f"≤ {model_axes.TARGET}", f"1 ± {schedules.GAIN_TARGET}"}
    assert asked["overhead"] == {f"< {overhead.TARGET:.0f}"}
    assert asked["memory"] == {f"≤ {memory.ALLOWANCE}"}
    assert asked["materialise"] == {f"≤ {materialise.ALLOWANCE}"}
    assert asked["cutting"] == {f"≤ {cutting.TARGET}"}
    limits = (estimate_memory.MEDIAN_LIMIT, estimate_memory.WORST_LIMIT)
    assert asked["estimate_memory"] == {f"≤ {limit:.0%}" for limit in limits}
    step, set_up = claims_of(_peers(peer="torch by hand"))
    assert (step.asked, set_up.asked) == (f"≤ {peers.TARGET}", f"≤ {peers.SET_UP_TARGET}")


def test_peers_that_do_not_run_are_rows_with_their_reason() -> None:
    text = page([_peers(error="needs a GPU")])
    assert "does not run: needs a GPU" in text
    assert "Nothing: every figure" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": "slower", "cpu_ratio": _spread(1.2)}, "20.0% more processor time"),
        ({"peak_mib": 20.0}, "our peak is 20 MiB, theirs 10"),
        ({"setup_ratio": {**_spread(2.0), "n": 5}}, "our set-up takes 2.00 times as long"),
        ({"same": False, "loss_apart": 0.5}, "0.5 apart"),
    ],
)
def test_where_a_peer_is_better_the_page_says_so(changes: dict[str, Any], said: str) -> None:
    short = page([_peers(**changes)]).split("## Where it falls short")[1].split("## Beside")[0]
    assert said in short
    assert said not in page([_peers()])
