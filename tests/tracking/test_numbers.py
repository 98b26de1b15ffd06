"""Whatever holds one number is a metric; what does not is left out, said once, and takes no other metric with it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from atorch_ns.tracking import JsonlTracker, ProgressTracker, StepMeter, TensorBoardTracker, Tracking
from atorch_ns.tracking._numbers import Numbers

GOOD: dict[str, Any] = {
    "float": 2.0,
    "int": 2,
    "bool": True,
    "tensor": torch.tensor(2.0, requires_grad=True),
    "bf16": torch.tensor(2.0, dtype=torch.bfloat16),
    "tensor_int": torch.tensor(2),
    "numpy": np.float32(2.0),
    "numpy_bool": np.bool_(True),
    "array": np.array(2),
}
BAD: dict[str, Any] = {
    "huge": 10**400,
    "text": "2.0",
    "none": None,
    "vector": torch.ones(3),
    "list": [1.0],
    "complex": torch.tensor(1j),
    "meta": torch.ones((), device="meta"),
    "divided": SimpleNamespace(placements=(), ndim=0, item=lambda: 1.0),
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_numbers_become_floats(caplog: pytest.LogCaptureFixture) -> None:
    numbers = Numbers()
    for _ in range(2):
        found = numbers.of({**BAD, **GOOD})
        assert found == {name: 1.0 if "bool" in name else 2.0 for name in GOOD}
        assert {type(value) for value in found.values()} == {float}
    told = warnings(caplog)
    assert len(told) == len(BAD)
    for name, text in zip(BAD, told, strict=True):
        assert text.startswith(f"the metric '{name}' is left out")
    assert "a Tensor, which is no number (it has the shape (3,))" in told[3]
    assert "full_tensor()" in told[-1]


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "tensorboard", "progress"])
def test_every_tracker_takes_them(
    kind: str, through: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
    stream = io.StringIO()
    makers: dict[str, Callable[[], JsonlTracker | TensorBoardTracker | ProgressTracker]] = {
        "jsonl": lambda: JsonlTracker(tmp_path / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardTracker(tmp_path),
        "progress": lambda: ProgressTracker(stream=stream),
    }
    tracker = makers[kind]()
    log = (
        Tracking(tracker, StepMeter(torch.device("cpu"), None, None), every=1).log if through else tracker.log
    )
    log({"x": "no number", "train/loss": torch.tensor(2.0), "train/lr": np.float32(0.5)}, 1)
    tracker.close()
    assert len(warnings(caplog)) == 1
    assert "'x' is left out" in caplog.text
    if kind == "jsonl":
        row = json.loads((tmp_path / "metrics.jsonl").read_text())
        assert (row["train/loss"], row["train/lr"], "x" in row) == (2.0, 0.5, False)
    elif kind == "progress":
        assert "loss 2  lr 0.5" in stream.getvalue()
