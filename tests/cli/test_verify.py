"""``atorch-ns verify``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atorch_ns.cli.verify import _drift_verdict
from opt_lib.module_replace import unregister_replace_pair
from tests.cli.conftest import Run

_JOB = ("--model", "job.py:build", "--sample", "job.py:sample2", "--loss", "job.py:loss")
_MORE = """

def sample2():
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


class Wrong(Model):
    def forward(self, features):
        import os

        return super().forward(features) * (2 if os.environ.get("RANK") == "1" else 1)


class FailsOnOne(Model):
    def forward(self, features):
        import os

        if os.environ.get("RANK") == "1":
            raise ValueError("only here")
        return super().forward(features)


class Fails(Model):
    def forward(self, features):
        raise ValueError("everywhere")


def pair():
    return sample2(), torch.arange(4)


def total(batch, output):
    return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum")
"""


@pytest.fixture
def folder(job: Path) -> Path:
    with (job / "job.py").open("a") as file:
        file.write(_MORE)
    return job


def _verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from atorch_ns.cli import main; main()"
    command = [sys.executable, "-c", code, "verify", "--steps", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_two_ranks_that_drift_are_exit_code_1(folder: Path) -> None:
    done = _verify("--strategy", "ddp", "--model", "job.py:Wrong", *_JOB[2:], "--json")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert (found["passed"], found["world_size"], found["num_steps"]) == (False, 2, 2)
    assert found["num_judged"] == len(found["parameters"]) == 8
    assert found["parameters"][0]["state"] == "drifts"
    assert "parameters differ from one process" in " ".join(found["reasons"])


def test_one_rank_and_a_table(folder: Path, run: Run, inline_ranks: None) -> None:
    done = run("verify", "--strategy", "checkpoint", *_JOB, "--nproc", "1", "--top", "3")
    assert done.returncode == 0, done.stderr
    assert "✓ trains as one process does" in done.stdout
    assert "layers.3.0.weight" in done.stdout or "layers.0.0.weight" in done.stdout
    assert "and 5 more, none worse" in done.stdout
    document = json.loads(run("verify", "--strategy", "checkpoint", *_JOB, "--nproc", "1", "--json").stdout)
    assert document["passed"] is True


def test_a_strategy_that_cannot_be_used_here_is_wrong_usage(
    folder: Path, run: Run, inline_ranks: None
) -> None:
    done = run("verify", "--strategy", "fsdp,zero1", *_JOB, "--nproc", "1")
    assert done.returncode == 2
    assert "cannot be combined" in done.stderr


def test_a_model_of_features_and_a_loss_that_is_a_sum_over_samples(folder: Path) -> None:
    pair = ("--model", "job.py:build", "--sample", "job.py:pair", "--loss", "job.py:total")
    done = _verify("--strategy", "ddp", *pair, "--json")
    assert done.returncode == 1, done.stderr
    assert "only the first item is passed to the model" in done.stderr
    assert done.stderr.count("only the first item") == 1  # one rank says it
    found = json.loads(done.stdout)
    assert found["num_samples"] == 4
    (reason,) = found["reasons"]
    assert "not a mean over samples" in reason


def test_a_model_that_fails_under_the_strategy_on_one_rank(folder: Path) -> None:
    done = _verify("--strategy", "ddp", "--model", "job.py:FailsOnOne", *_JOB[2:], "--json")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert found["rank"] == 1
    assert found["code"] == 2
    assert "training under " in found["error"]
    assert "failed on rank 1: ValueError: only here" in found["error"]
    assert "job.py, line " in found["error"]


def test_a_model_that_fails_in_one_process(folder: Path, run: Run, inline_ranks: None) -> None:
    rest = (*_JOB[2:], "--nproc", "1")
    done = run("verify", "--strategy", "checkpoint", "--model", "job.py:Fails", *rest)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "training in one process, without any strategy, failed on rank 0: ValueError" in done.stderr
    assert "job.py, line " in done.stderr
    pair = ("--sample", "job.py:pair", "--loss", "job.py:total", "--input-format", "unpack_sequence")
    wrong = run("verify", "--strategy", "checkpoint", *_JOB[:2], *pair, "--nproc", "1")
    assert wrong.returncode == 2
    assert "--input-format" in wrong.stderr


def test_the_first_line_names_the_loss_if_it_alone_drifts() -> None:
    row = {"name": "w", "state": "ok"}
    assert "only the loss" in _drift_verdict({"reasons": ["the loss is off by 1"], "parameters": [row]})
    drifting = {"reasons": ["1 of 1 parameters are not"], "parameters": [{**row, "state": "drifts"}]}
    assert _drift_verdict(drifting) == "✗ does not train as one process does"


def test_the_keys_that_forward_does_not_take_are_for_the_loss(
    folder: Path, run: Run, inline_ranks: None
) -> None:
    with (folder / "job.py").open("a") as file:
        file.write(
            "\n\ndef named():\n    return {'features': sample2(), 'label': torch.arange(4), 'weight': torch.ones(4)}\n"
            "\n\ndef of_labels(batch, output):\n"
            "    return torch.nn.functional.cross_entropy(output, batch['label'])\n"
        )
    job = ("--model", "job.py:build", "--sample", "job.py:named", "--loss", "job.py:of_labels")
    done = run("verify", "--strategy", "checkpoint", *job, "--nproc", "1", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "'label', 'weight' are for the loss alone" in done.stderr
    assert "on 1 rank, 2 steps" in done.stdout
    assert run("estimate", "--strategy", "checkpoint", *job).returncode == 0


def test_a_failure_before_ranks_are_started_is_a_record_too(folder: Path, run: Run) -> None:
    done = run("verify", "--strategy", "ddp", *_JOB, "--steps", "0", "--json")
    assert done.returncode == 2
    assert "at least one step" in json.loads(done.stdout)["error"]


_REGISTERS = """
import torch
from torch import nn

from opt_lib.module_replace import register_replace_pair


class Slow(nn.Linear):
    pass


@register_replace_pair("slow_linear_of_a_file", replaces=Slow)
class Fast(Slow):
    pass


def build():
    return nn.Sequential(Slow(8, 8))


def sample():
    return torch.zeros(4, 8)


def loss(batch, output):
    return (output - batch).square().mean()
"""


def test_a_file_that_registers_something_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, inline_ranks: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "registers.py").write_text(_REGISTERS)
    done = run(
        "verify", "--strategy", "module_replace", "--model", "registers.py:build", "--sample", "registers:sample",
        "--loss", "registers.py:loss", "--nproc", "1", "--steps", "1",
    )  # fmt: skip
    try:
        assert done.returncode == 0, done.stderr
    finally:
        sys.modules.pop("registers", None)
        unregister_replace_pair("slow_linear_of_a_file")
