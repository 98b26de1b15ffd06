"""Trackers: files that read back, lines and bars on a terminal, and runs of Weights & Biases, offline."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.errors import MissingPackageError
from atorch_ns.tracking import JsonlTracker, ProgressTracker, TensorBoardTracker, Tracker, WandbTracker


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_one_line_a_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    tracker = JsonlTracker(path, clock=lambda: 12.34567)
    tracker.log({"train/loss": 2.5, "train/lr": 0.1}, 10)
    assert rows(path) == [{"step": 10, "time": 12.346, "train/loss": 2.5, "train/lr": 0.1}]  # before close
    tracker.log({"train/loss": 2.0}, 20)
    tracker.close()
    tracker.close()
    assert [row["step"] for row in rows(path)] == [10, 20]


@given(st.floats())
def test_jsonl_is_json_whatever_the_number(value: float) -> None:
    from atorch_ns.tracking.trackers import _json_value

    def no_constant(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    read = float(json.loads(json.dumps(_json_value(value)), parse_constant=no_constant))
    assert read == value or (read != read and value != value)


def test_jsonl_appends_and_mends_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "train/lo')
    tracker = JsonlTracker(path)
    tracker.log({}, 2)
    tracker.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"step": 2, "train/lo']
    assert json.loads(lines[2])["step"] == 2


FULL = """
import resource, signal, sys
from atorch_ns.tracking import JsonlTracker
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tracker = JsonlTracker(sys.argv[1])
for step in range(1, 5):
    limit = 130 if step in (2, 3) else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        tracker.log({"train/loss": 0.5, "x" * 40: 1.0}, step)
    except OSError as error:
        print(step, type(error).__name__)
tracker.close()
"""


def test_a_line_that_a_full_disk_cuts_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "OSError", "3", "OSError"]
    assert [row["step"] for row in rows(path)] == [1, 4]


def test_a_torn_line_that_cannot_be_cut_off_stays_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker, write = JsonlTracker(path), FileIO.write

    class Torn(FileIO):
        def write(self, data: Any) -> int:
            if failing and len(data) < 20:
                raise OSError(28, "No space left on device")
            return write(self, data[:-10] if failing else data)

    def no_truncate(handle: int, size: int) -> None:
        raise OSError(1, "Operation not permitted")

    failing = True
    monkeypatch.setattr("atorch_ns.tracking.trackers.FileIO", Torn)
    monkeypatch.setattr(os, "ftruncate", no_truncate)
    with pytest.raises(OSError, match="No space left"):
        tracker.log({"train/loss": 0.5}, 1)
    failing = False
    tracker.log({"train/loss": 0.25}, 2)
    tracker.close()
    _, last = path.read_text().splitlines()
    assert json.loads(last)["train/loss"] == 0.25


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    for step in (10, 20):
        tracker.log({"train/loss": 1 / step, "memory/peak_gib": 0.5}, step)
    tracker.close()
    again = TensorBoardTracker(tmp_path)  # a run that went back to a checkpoint at step 15
    again.log({"train/loss": 7.0}, 20)
    again.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "memory/peak_gib"}
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(10, pytest.approx(0.1)), (20, 7.0)]


def test_progress_writes_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    tracker = ProgressTracker(100, stream=stream, every_s=30.0, clock=lambda: now[0])
    for step in range(1, 6):
        tracker.log({"train/loss": 2.0 / step, "train/samples_per_second": 1234.5}, step)
        now[0] += 16.0
    tracker.close()
    tracker.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/100  loss 2  1,234.5 samples/s"
    assert [line.split()[1] for line in lines] == ["1/100", "3/100", "5/100"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    tracker = ProgressTracker(8, stream=stream)
    tracker.log({"train/loss": 2.0}, 8)
    tracker.close()
    assert "8/8" in stream.getvalue()
    assert "loss 2" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is there again


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda folder: TensorBoardTracker(folder / "runs"), "tensorboard"),
        (lambda folder: WandbTracker(project="p", folder=folder / "runs"), "wandb"),
    ],
)
def test_a_missing_package_is_said_at_once(
    make: Callable[[Path], Tracker], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(package) is not None:
        tracker = make(tmp_path)
        assert isinstance(tracker, Tracker)
        tracker.close()
        assert not list(tmp_path.iterdir())  # ranks other than 0 make one too
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=rf"pip install 'atorch-ns\[{package}\]'"):
        make(tmp_path)


ROOT = Path(__file__).parents[2]
RUN = """
import sys
from atorch_ns.tracking import WandbTracker
tracker = WandbTracker(project="p", name="n", folder=sys.argv[1], config={"lr": 0.1})
for step in (10, 20, 10):
    tracker.log({"train/loss": 1 / step}, step)
tracker.close()
tracker.close()
"""


def test_wandb_offline_keeps_every_row(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WANDB_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert history(file) == [(10, 0.1), (20, 0.05), (10, 0.1)]


def history(file: Path) -> list[tuple[int, float]]:
    """The rows of a run's file: seven bytes, then records as in LevelDB's log: checksum, length, type, data."""
    from wandb.proto import wandb_internal_pb2

    data, place, rows = file.read_bytes(), 7, []
    while place + 7 <= len(data) <= 32768:  # in one block, every record is whole
        _, length, _ = struct.unpack_from("<IHB", data, place)
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[place + 7 : place + 7 + length])
        place += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append((items["step"], items["train/loss"]))
    return rows


ELSEWHERE = """
import logging, sys
from types import SimpleNamespace
from atorch_ns.tracking import WandbTracker
import wandb
run = SimpleNamespace(dir=sys.argv[2], define_metric=lambda *a, **k: None, log=lambda row: None, finish=lambda: None)
wandb.init = lambda **options: run
logging.basicConfig(stream=sys.stdout, format="%(message)s")
tracker = WandbTracker(project="p", folder=sys.argv[1])
tracker.log({"train/loss": 1.0}, 1)
tracker.close()
"""


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_run_that_is_written_elsewhere_is_said(tmp_path: Path, elsewhere: bool) -> None:
    pytest.importorskip("wandb")
    asked, other = tmp_path / "asked", tmp_path / "other"
    place = (other if elsewhere else asked) / "wandb" / "run-1" / "files"
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(asked), str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    said = f"wandb cannot write to {asked}, so it writes this run to {place.parent}."
    assert done.stdout.strip() == (said if elsewhere else "")
