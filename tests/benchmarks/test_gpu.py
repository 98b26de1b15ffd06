"""The benchmark of one GPU: its arithmetic, and its recipes on a CPU with a tiny model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks._gpu_recipes import Setting
from benchmarks._llama import Llama

pytestmark = pytest.mark.processes

TINY = Llama(vocab_size=64, width=32, hidden=64, num_layers=2, num_heads=2)


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said: list[str] = []
    assert gpu.run(quick=True, report=said.append) is None
    assert said == ["gpu: no GPU, so nothing is measured"]


@pytest.mark.slow
def test_every_comparison_runs_on_a_cpu() -> None:
    pytest.importorskip("transformers")
    setting = Setting(model=TINY, batch_size=2, num_tokens=16, device="cpu", backend="aot_eager")
    with gpu.one_rank("cpu"):
        rows = gpu.compared(setting, rounds=2, report=lambda text: None)
    assert len(rows) == 5
    assert not any("not measured" in row["name"] for row in rows[:4])  # Liger has no kernels for CPUs
    step = rows[0]
    assert step["name"] == "step"
    assert step["n"] == 2
    assert step["ratio"].median > 0
    assert isinstance(step["holds"], bool)


def _row(key: str, seconds: float, peak: int, predicted: float) -> Any:
    candidate = SimpleNamespace(key=key, strategy=key, estimate=SimpleNamespace(allocated_bytes=predicted))
    trial = SimpleNamespace(succeeded=True, median_seconds=seconds, peak_bytes=(peak,))
    return SimpleNamespace(candidate=candidate, trial=trial)


def test_what_a_search_is_held_to() -> None:
    rows = [_row("a", 1.0, 100, 103.0), _row("b", 1.02, 200, 180.0)]
    outcome: Any = SimpleNamespace(rows=rows, winner=rows[1])
    choice, memory = gpu.choice_row(outcome), gpu.memory_row(outcome)
    assert (choice["n"], choice["ratio"], choice["holds"]) == (2, pytest.approx(1.02), True)
    assert (memory["n"], memory["error"], memory["holds"]) == (2, pytest.approx(-0.1), False)
