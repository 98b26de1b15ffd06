"""``atorch-ns verify --script``: scripts as they are, in one process and on ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

_HEAD = """
import os, sys, torch
from torch import nn
from atorch_ns import auto_accelerate

rank = int(os.environ["RANK"])
torch.manual_seed(0)
data = torch.randn(64, 16)

def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, outputs))

def job(model, **more):
    return auto_accelerate(
        model, torch.optim.AdamW, data, lambda batch, output: (output - batch).square().mean(),
        dataloader_args={"batch_size": 8}, **{"load_strategy": ["ddp"], **more},
    )[1]
"""
_STEPS = """
result = job(net(16, 16))
schedule = torch.optim.lr_scheduler.StepLR(result.optim, 2)
for batch in result.dataloader:
    print("loss", float(result.train_step(batch)), *sys.argv[1:])
    schedule.step()
"""
_SCALED = """
result = job(net(16, 16), load_strategy=["zero1"])
for number, batch in enumerate(result.dataloader):
    result.optim.zero_grad()
    result.loss_func(batch, result.model(batch)).backward()
    if number == 1:
        for parameter in result.model.parameters():
            parameter.grad.mul_(int(os.environ["WORLD_SIZE"]))  # alike on all ranks, which go on
    result.optim.step()
"""
_ADVERSARIES = """
made, judged = job(net(8, 16)), job(net(16, 1), load_strategy=["zero1"])
noise = torch.randn(64, 8)
loss = nn.functional.binary_cross_entropy_with_logits
for number, real in enumerate(made.dataloader):
    count = len(real)
    first = 8 * number + (rank if SEEN else 0) * count
    fake = made.model(noise[first : first + count])
    yes, no = torch.ones(count, 1), torch.zeros(count, 1)
    judged.optim.zero_grad()
    (loss(judged.model(real), yes) + loss(judged.model(fake.detach()), no)).backward()
    judged.optim.step()
    made.optim.zero_grad()
    loss(judged.model(fake), yes).backward()
    made.optim.step()
"""
_LEFT_OUT = """
result = job(net(16, 16))
for number, batch in enumerate(result.dataloader):
    result.optim.zero_grad()
    result.loss_func(batch, result.model(batch)).backward()
    if not (number == 1 and rank == 1):
        result.optim.step()
"""
_DRAWN = """
torch.manual_seed(int(os.environ["WORLD_SIZE"]))
result = job(net(16, 16), load_strategy=["fsdp"])
for batch in result.dataloader:
    result.train_step(batch)
"""


def _verify(folder: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(_HEAD + body)
    code = "from atorch_ns.cli import main; main()"
    command = [sys.executable, "-c", code, "verify", "--script", str(script), "--steps", "3", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("strategy", ["fsdp", '[["parallel_mode", [[["tensor", 2]], null]]]'])
def test_a_script_trains_as_in_one_process(strategy: str, tmp_path: Path) -> None:
    done = _verify(tmp_path, _STEPS, "--strategy", strategy, "--json", "--", "--flag", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert [update["step"] for update in found["updates"]] == [0, 1, 2, 3]
    assert found["num_dropouts"] == 1
    assert done.stderr.count("--flag 7") >= 3  # the script's own output, on the ranks alone


def test_the_first_difference_is_named_with_its_line(tmp_path: Path) -> None:
    done = _verify(tmp_path, _SCALED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "after update 2: " in done.stdout
    assert "is off by" in done.stdout
    assert f"train.py:{(_HEAD + _SCALED).count(chr(10))}: result.optim.step()" in done.stdout


@pytest.mark.parametrize("seen", [True, False])
def test_two_models_with_two_optimizers(seen: bool, tmp_path: Path) -> None:
    done = _verify(tmp_path, _ADVERSARIES.replace("SEEN", str(seen)))
    assert done.returncode == (0 if seen else 1), done.stdout + done.stderr
    assert "parallel_mode + ddp; parallel_mode + ddp + zero1" in done.stdout
    assert ("after update 1 of job 2" in done.stdout) is not seen  # which steps first


@pytest.mark.parametrize(
    ("body", "words"),
    [(_LEFT_OUT, "on rank 1 is off by"), (_DRAWN, "before the first update"), ("print(1)", "no job")],
    ids=["a rank leaves out an update", "other weights", "no job"],
)
def test_what_ends_is_explained(body: str, words: str, tmp_path: Path) -> None:
    done = _verify(tmp_path, body)
    assert done.returncode in (1, 2)
    assert words in done.stdout + done.stderr


def test_options_that_do_not_go_together_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for arguments, words in (
        (("--script", "train.py", "--model", "a:b"), "leave --model out"),
        (("--script", "nosuch.py"), "no such file"),
        (("--strategy", "ddp", "--", "more"), "arguments are those of a script"),
    ):
        done = run("verify", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
