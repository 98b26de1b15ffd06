"""Numbers with their spread, and the files they are written to."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._context import Context
from benchmarks._results import Column, Findings, Spread, write


def test_spread() -> None:
    spread = Spread.of([5, 1, 3, 2, 4])
    assert (spread.n, spread.smallest, spread.p25, spread.median, spread.p75, spread.largest) == (
        5,
        1,
        2,
        3,
        4,
        5,
    )
    assert spread.text(1) == "3.0 (2.0..4.0)"


def test_confidence_narrows_with_the_number_of_values() -> None:
    assert (Spread.of(range(4)).low, Spread.of(range(4)).high) == (0, 3)
    wide, narrow = Spread.of(x / 100 for x in range(100)), Spread.of(x / 10000 for x in range(10000))
    assert 0.38 < wide.low < 0.42 < 0.58 < wide.high < 0.62
    assert 0.48 < narrow.low < 0.5 < narrow.high < 0.52


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_spread_is_ordered(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.smallest <= spread.low <= spread.median <= spread.high <= spread.largest
    assert spread.smallest <= spread.p25 <= spread.median <= spread.p75 <= spread.largest


FINDINGS = Findings(
    name="taste",
    title="Taste",
    text="\nWhat it is like.\n",
    columns=(
        Column(title="fruit", key="fruit"),
        Column(title="weight g", key="grams", digits=1),
        Column(title="ratio", key="ratio", confidence=True),
        Column(title="ripe", key="ripe"),
    ),
    rows=[
        {
            "fruit": "pear",
            "grams": Spread.of([1, 2, 3]),
            "ratio": Spread.of([1, 1, 1]),
            "ripe": True,
            "bytes": 7,
        },
        {"fruit": "fig", "grams": 0.25, "ratio": None, "ripe": False},
    ],
    settings={"orchard": "small"},
)


def test_files(tmp_path: Path) -> None:
    paths = write(FINDINGS, tmp_path / "new", {"measured": "today", "machine": {"cores": 2}})
    assert [path.name for path in paths] == ["taste.json", "taste.md"]
    data = json.loads(paths[0].read_text())
    assert data["benchmark"] == "taste"
    assert data["machine"]["cores"] == 2
    assert data["rows"][0]["bytes"] == 7
    assert data["rows"][0]["grams"]["median"] == 2
    assert paths[1].read_text() == (
        "# Taste\n\nWhat it is like.\n\n"
        "| fruit | weight g       | ratio                | ripe   |\n"
        "| ----- | -------------- | -------------------- | ------ |\n"
        "| pear  | 2.0 (1.5..2.5) | 1.000 [1.000, 1.000] | yes    |\n"
        "| fig   | 0.2            |                      | **no** |\n\n"
        "- orchard: small\n- measured: today\n- machine: cores 2\n"
    )


def test_context_names_the_machine_but_not_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "somebody-special")
    facts = Context().facts()
    assert facts["machine"]["cores"] == os.cpu_count()
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["versions"]["torch"].startswith("2.")
    text = json.dumps(facts)
    for secret in (platform.node(), "somebody-special", str(Path.cwd())):
        assert secret not in text
