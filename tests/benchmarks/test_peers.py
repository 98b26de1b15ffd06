"""Peers beside us: verdicts, reasons, and a tiny run with plain torch."""

from __future__ import annotations

import pytest

from benchmarks import peers
from benchmarks._peers._peer import TASKS, Peer, Task, Trainer
from benchmarks._peers.torch_by_hand import TORCH
from benchmarks._results import Spread

pytestmark = pytest.mark.processes

WITHOUT_TIME: list[str] = []


def _fails(task: Task, *_: object) -> Trainer:
    raise RuntimeError(f"no {task.name} here\nand more")


def test_a_verdict_needs_the_whole_interval() -> None:
    assert peers.verdict(Spread.of([0.9, 0.95])) == "faster"
    assert peers.verdict(Spread.of([0.9, 1.1])) == "equal"
    assert peers.verdict(Spread.of([1.1, 1.2])) == "slower"


def test_quick_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    broken = Peer(name="broken", start=_fails)  # type: ignore[arg-type]
    absent = Peer(name="absent", start=TORCH.start, prepare=lambda: "it is not installed")
    lacking = Peer(name="lacking", start=TORCH.start, lacks={TASKS[0].name: "it cannot"})
    monkeypatch.setattr(peers, "PEERS", (TORCH, broken, absent, lacking))
    monkeypatch.setattr(peers, "_NUM_QUICK", 4)
    found = peers.run(quick=True, report=WITHOUT_TIME.append).rows
    torch_row, broken_row, absent_row, lacking_row = found
    assert torch_row["same"]
    assert torch_row["loss_apart"] < 1e-6
    assert (
        torch_row["losses"][-1] < torch_row["losses"][0] - 0.1
    )  # it learns, so that equal losses mean something
    assert torch_row["peak_mib"] == pytest.approx(torch_row["peak_mib_peer"], rel=0.02)
    assert torch_row["pairs"] == 2
    assert broken_row["error"] == "RuntimeError: no DDP here"
    assert absent_row["error"] == "it is not installed"
    assert lacking_row["error"] == "it cannot"
