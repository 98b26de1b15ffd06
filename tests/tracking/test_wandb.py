"""Weights & Biases, offline: a run in a process of its own, read back from its file."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

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
    said = f"wandb cannot write to {asked}, and writes this run to {place.parent}."
    assert done.stdout.strip() == (said if elsewhere else "")
