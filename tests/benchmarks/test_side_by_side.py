"""Live peers: the processes that are driven, the reasons in cells, and what is taken over from nnScaler's plans."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import side_by_side
from benchmarks._llama import TINY
from benchmarks._peers import _beside
from benchmarks._peers._beside import Beside, ask_all
from benchmarks._results import Spread

pytestmark = pytest.mark.processes

WITHOUT_TIME: list[str] = []
ANSWERING = """
from benchmarks._peers._beside import serve

def work(tell):
    print("what the peer prints is not an answer")
    command = tell({})
    raise ValueError(f"no {command} here\\nand more")

serve(work)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(_beside, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.timeout(60)
def test_a_process_answers_and_says_what_went_wrong() -> None:
    variables = {**os.environ, "PYTHONPATH": str(_beside.ROOT)}
    beside = Beside("a peer", sys.executable, ["-c", ANSWERING], variables)
    try:
        assert beside.answer().keys() == {"cpu_s"}
        assert beside.cpu_s > 0
        with pytest.raises(RuntimeError, match=r"^ValueError: no step here$"):
            ask_all([beside], "step")
    finally:
        beside.end()


@pytest.mark.timeout(60)
def test_a_process_that_ends_is_named() -> None:
    beside = Beside("a peer", sys.executable, ["-c", "raise SystemExit(3)"], os.environ)
    with pytest.raises(RuntimeError, match="a peer's process ended with exit code 3"):
        beside.answer()
    beside.end()


def test_a_source_that_cannot_be_had_says_where_to_put_it(folder: Path) -> None:
    reason = _beside.source("nnscaler", str(folder / "nowhere"), "1585c15")
    assert reason.startswith(f"its source could not be had from {folder / 'nowhere'}: ")
    assert reason.endswith(f"{folder / 'nnscaler-source'} may hold it")


def test_a_source_that_is_there_is_taken(folder: Path) -> None:
    (folder / "nnscaler-source").mkdir()
    assert _beside.source("nnscaler", str(folder / "nowhere"), "1585c15") == ""


def test_a_peer_that_is_missing_has_the_reason_in_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "prepare", lambda peer: f"no source of {peer}")
    rows = side_by_side.run(quick=True, report=WITHOUT_TIME.append).rows
    assert {(row["peer"], row["error"]) for row in rows} == {
        (peer, f"no source of {peer}") for peer in ("nnScaler", "Merak", "AutoParallel")
    }
    assert {row["part"] for row in rows} == {"planning", "training"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("peer", "missing"), [("nnScaler", "nnscaler"), ("Merak", "Merak"), ("AutoParallel", "autoparallel")]
)
def test_our_side_answers_where_the_peer_cannot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, peer: str, missing: str
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(side_by_side, "python_of", lambda name: sys.executable)
    monkeypatch.setenv("BENCHMARK_PEERS", str(folder))
    options = {"size": side_by_side.asdict(TINY), "policy": "autodist", "degree": 2, "stages": 2}
    work = side_by_side.Work(
        part="planning", work="a Llama", peer=peer, ranks=2, options={**options, "meta": True}
    )
    row = side_by_side._row(work, 2)
    assert missing in row["error"]
    assert "ours" not in row["error"]
    assert row["ours_s"].median > 0


def test_rows_are_kept_as_they_were(tmp_path: Path) -> None:
    work = side_by_side.Work(part="training", work="dp", peer="nnScaler", ranks=2)
    row: dict[str, Any] = {
        "part": "training",
        "work": "dp",
        "peer": "nnScaler",
        "ratio": Spread.of([0.5, 1.0]),
    }
    file = tmp_path / "folder" / "rows.jsonl"
    assert side_by_side._kept(file, work) is None
    side_by_side._keep(file, row)
    assert side_by_side._kept(file, work) == row


def test_choices_of_most_blocks_stand_for_a_key() -> None:
    chosen = side_by_side.choices_by_key(
        [
            ["model.model.embed_tokens", "embedding", 0, 1],
            ["model.model.layers.0.mlp.up_proj", "linear", 1, 0],
            ["model.model.layers.1.mlp.up_proj", "linear", 1, 0],
            ["model.model.layers.2.mlp.up_proj", "linear", -1, -1],
            ["model.model.layers.0.mlp", "mul", 0, 2],
            ["model.lm_head", "linear", -1, -1],
        ]
    )
    assert chosen == {
        "model.embed_tokens/embedding#0": (1, 1),
        "model.layers.*.mlp.up_proj/linear#0": (1, 0),
        "lm_head/linear#0": (-1, -1),
    }
