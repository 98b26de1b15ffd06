"""A strategy that a script saved, with a class of its own in it, in another script and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atorch_ns.strategy import Strategy

ROOT = Path(__file__).parents[2]
JOB = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(x)

def build():
    return nn.Sequential(Block(), Block())

def sample():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

def loss(batch, output):
    return (output - batch.sin()).square().mean()
"""
SCRIPT = """
from atorch_ns import auto_accelerate

_, result, strategy = auto_accelerate(
    build(), torch.optim.AdamW, torch.randn(32, 8), loss, dataloader_args={"batch_size": 8},
    load_strategy=["fsdp", ("checkpoint", (Block,))], save_strategy_to_file="strategy.json",
)
assert strategy["checkpoint"] == {"wrap_class": ["Block"]}, strategy
"""
VERIFY = ["verify", "--strategy", "strategy.json", "--model", "job.py:build", "--sample", "job.py:sample"]


def _run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_a_class_of_a_script_is_found_where_its_file_is_imported(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "train.py").write_text(JOB + SCRIPT)
    _run(tmp_path, "train.py")
    saved = Strategy.load(tmp_path / "strategy.json")
    assert saved["checkpoint"] == {"wrap_class": ["Block"]}
    assert "fsdp" in saved  # what one process leaves out shards on the two of verify
    # A file may also have been written as the class is called in the script.
    text = json.loads((tmp_path / "strategy.json").read_text())
    text["steps"][0]["config"] = {"wrap_class": ["__main__.Block"]}
    (tmp_path / "strategy.json").write_text(json.dumps(text))
    told = _run(tmp_path, "-m", "atorch_ns.cli", *VERIFY, "--loss", "job.py:loss", "--steps", "2")
    assert "trains as one process does" in told
    assert "checkpoint.wrap_class: __main__.Block is not in this model; taken as Block" in told
