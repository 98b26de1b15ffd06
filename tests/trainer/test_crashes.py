"""Runs of the Trainer that are killed: what was saved goes on, on another number of ranks, as one process would have."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from tests.trainer.test_runs import plain, weights
from tests.warm import COLD_PYTHON  # whose processes are its own, and can be killed

ROOT = Path(__file__).parents[2]
STEPS = 12


def config(folder: Path) -> Path:
    """The run of ``test_runs`` with a checkpoint at each step, and a pause in which it can be killed."""
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"type": "tests.trainer.parts.Model"},
                "optimizer": {"type": "torch.optim.Adam", "args": {"lr": 0.01}},
                "dataset": {"type": "tests.trainer.parts.Dataset", "train_args": {"size": 20}},
                "micro_batch_size": 2,
                "global_batch_size": 8,
                "max_train_steps": STEPS,
                "seed": 3,
                "pas_policy": "dp",
                "gen_savedir": str(folder / "plans"),
                "hook": {"on_step_end": "tests.trainer.parts.pause"},
                "checkpoint": {
                    "save_dir": str(folder / "checkpoints"),
                    "every_n_train_steps": 1,
                    "keep_last_n_checkpoints": 2,
                    "resume_from": "last",
                },
            }
        )
    )
    return path


def command(path: Path, ranks: int, *more: str) -> list[str]:
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [COLD_PYTHON, *many, "-m", "atorch_ns.trainer", "-f", str(path), *more]


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finished(folder: Path) -> int:
    """The steps of the newest checkpoint."""
    last = folder / "checkpoints" / "last"
    return int(last.resolve().name.rpartition("-")[2]) if last.exists() else 0


def kill_after(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    try:
        limit = time.monotonic() + 60
        while finished(folder) < step and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.02)
        time.sleep(random.random() * 0.2)  # anywhere in the steps or saves that follow
    finally:
        own = psutil.Process(process.pid)  # torchrun's ranks are in sessions of their own
        for one in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(30)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_that_is_killed_goes_on_on_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    path = config(tmp_path)
    kill_after(start(command(path, before)), tmp_path, 4)
    saved = finished(tmp_path)
    assert 4 <= saved < STEPS
    done = subprocess.run(
        command(path, after), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"after {saved} steps; saved on {before} rank" in done.stderr
    state = weights(tmp_path)
    for name, value in plain(num_steps=STEPS)["weights"].items():
        assert torch.allclose(state[name], value, atol=2e-5), name


def test_torchrun_starts_a_run_again_when_a_rank_is_killed(tmp_path: Path) -> None:
    """The hook kills one rank once; torchrun starts both again, which go on from the last checkpoint."""
    path = config(tmp_path)
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=2"]
    words = ["-f", str(path), "--hook.on_step_end", "tests.trainer.parts.die_once"]
    done = subprocess.run(
        [sys.executable, *many, "-m", "atorch_ns.trainer", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "DIES_BY": str(tmp_path / "died")},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    assert "Resumed from" in done.stderr
    state = weights(tmp_path)
    for name, value in plain(num_steps=STEPS)["weights"].items():
        assert torch.allclose(state[name], value, atol=2e-5), name
