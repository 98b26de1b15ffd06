"""Tracking: metrics become floats, the global batch's loss is logged on rank 0 alone, and a tracker's failures stay its own."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.errors import InputError
from atorch_ns.job import Result
from atorch_ns.testing.workers import run_ranks
from atorch_ns.tracking import METRICS, JsonlTracker, ProgressTracker, StepMeter, TensorBoardTracker, Tracking
from atorch_ns.tracking.tracking import Numbers

BATCH = 8


class Kept:
    """Keeps what it is given; fails at some steps."""

    def __init__(self, *failing: int) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._failing = failing

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step in self._failing:
            raise OSError(28, "No space left on device")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def job(*strategy: object, max_grad_norm: float | None = None) -> Result:
    torch.manual_seed(0)
    _, result, _ = auto_accelerate(
        nn.Linear(4, 1),
        torch.optim.AdamW,
        torch.randn(64, 4),
        lambda batch, output: (output - batch.sum(-1, keepdim=True)).float().square().mean(),
        optim_param_func=lambda model: [
            {"params": [model.weight], "lr": 0.1},
            {"params": [model.bias], "lr": 0.2},
        ],
        dataloader_args={"batch_size": BATCH},
        load_strategy=list(strategy),
        max_grad_norm=max_grad_norm,
    )
    assert result is not None
    return result


def test_every_metric_has_its_name() -> None:
    result, tracker = job(("amp_native", {"dtype": torch.float16}), max_grad_norm=1e9), Kept()
    with result.track(tracker, every=2) as tracking:
        losses = [float(result.train_step(batch)) for batch in result.dataloader or ()]
        tracking.log({"eval/loss": 1.5}, 8)
    assert [step for step, _ in tracker.rows] == [2, 4, 6, 8, 8]
    rows = [row for _, row in tracker.rows]
    assert rows[-1] == {"eval/loss": 1.5}
    assert [row["train/loss"] for row in rows[:4]] == losses[1::2]
    assert rows[0]["train/lr"] == pytest.approx(0.1)
    assert rows[0]["train/lr/1"] == pytest.approx(0.2)
    assert rows[0]["train/loss_scale"] > 1
    assert rows[0]["train/grad_norm"] > 0
    assert rows[0]["train/samples_per_second"] == pytest.approx(BATCH / rows[0]["train/step_seconds"])
    assert 0.01 < rows[0]["memory/peak_gib"] < 100
    assert rows[0].keys() - {"train/lr/1"} == {metric.name for metric in METRICS}
    assert tracker.closed == 1
    assert not result.train_step.observers


def test_the_time_of_a_step_is_that_between_logged_steps() -> None:
    now = [100.0]
    meter = StepMeter(torch.device("cpu"), None, 12, clock=lambda: now[0])
    seen = []
    for step in range(1, 8):
        now[0] += 9.0 if step == 1 else 2.0  # the first one compiles
        meter.step()
        if step % 3 == 0:
            seen.append(meter.read(torch.tensor(1.0), None))
    assert [row["train/step_seconds"] for row in seen] == pytest.approx([2.0, 2.0])
    assert seen[0]["train/samples_per_second"] == pytest.approx(6.0)
    alone = StepMeter(torch.device("cpu"), None, 12)
    alone.step()
    assert "train/step_seconds" not in alone.read(torch.tensor(1.0), None)


def test_a_tracker_that_fails_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    result, tracker = job(), Kept(2, 3, 4)
    tracking = result.track(tracker, every=1)
    with caplog.at_level(logging.WARNING, logger="atorch_ns"):
        for batch in result.dataloader or ():
            result.train_step(batch)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 1, told
        assert "Kept lost the metrics of step 2: OSError: [Errno 28] No space left" in told[0]
        tracking.close()
    assert [step for step, _ in tracker.rows] == [1, 5, 6, 7, 8]  # it came back
    assert "failed 3 times" in caplog.records[-1].getMessage()


def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with job().track(JsonlTracker("/dev/full"), every=1) as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log({"x": 1.0}, 2)
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_every_must_be_a_number_of_steps(every: int) -> None:
    with pytest.raises(InputError, match="not a number of steps"):
        job().track(Kept(), every=every)


def test_steps_that_are_not_logged_do_not_wait_for_the_device() -> None:
    class Loss:  # reading it would fail
        pass

    tracking = Tracking(Kept(), StepMeter(torch.device("cpu"), None, None), every=10)
    for step in range(1, 10):
        tracking(step, Loss(), None)  # type: ignore[arg-type]


def on_two_ranks(folder: Path) -> list[float]:
    result = job("fsdp")
    with result.track(JsonlTracker(folder / f"rank-{os.environ['RANK']}.jsonl"), every=3):
        return [float(result.train_step(batch)) for batch in result.dataloader or ()]


def test_two_ranks_log_the_loss_of_the_global_batch_once(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, args=(tmp_path,))
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(3, first[2]), (6, first[5])]
    alone = job()
    whole = [float(alone.train_step(batch)) for batch in alone.dataloader or ()]
    assert first == pytest.approx(whole, abs=1e-5)


def test_the_documented_table_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text()
    rows = re.findall(r"^\| `(\w+/\w+)` \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert rows == [(metric.name, metric.unit, metric.meaning) for metric in METRICS]


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
        assert text.startswith(f"the metric '{name}' is skipped")
    assert "a Tensor, which is not a number (it has the shape (3,))" in told[3]
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
    assert "'x' is skipped" in caplog.text
    if kind == "jsonl":
        row = json.loads((tmp_path / "metrics.jsonl").read_text())
        assert (row["train/loss"], row["train/lr"], "x" in row) == (2.0, 0.5, False)
    elif kind == "progress":
        assert "loss 2  lr 0.5" in stream.getvalue()
