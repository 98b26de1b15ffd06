"""A user's script: classes of ``__main__``, a module that only the script can find, and Ctrl-C in a trial."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("cold_python")

HIDDEN = """
import torch

class Hidden(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()
"""

SCRIPT = """
import importlib.util, json, os, sys, threading
from pathlib import Path
import torch
from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.worker import TrialWorker
from atorch_ns.job import Inputs
from atorch_ns.search import StopRule, TrialTask

spec = importlib.util.spec_from_file_location("hidden_module", os.environ["HIDDEN"])
hidden = importlib.util.module_from_spec(spec)
sys.modules["hidden_module"] = hidden
spec.loader.exec_module(hidden)

WIDTH = 8

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = hidden.Hidden(WIDTH, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        print("in the trial, not in the user's output")
        return self.second(self.first(x))

inputs = Inputs(
    model=Net(),
    optim_func=torch.optim.SGD,
    optim_args={"lr": 0.1},
    dataset=[torch.randn(WIDTH) for _ in range(16)],
    loss_func=lambda batch, output: (output - batch.sum(-1, keepdim=True)).pow(2).mean(),
    dataloader_args={"batch_size": 4, "num_workers": 2},
)
before = dict(os.environ)
folder = Path(sys.argv[1])

def task(id, **rule):
    return TrialTask(id=id, key="", steps=(), rule=StopRule(**rule), deadline_s=60)

with TrialWorker(inputs, Cluster.detect(), rendezvous=None, log_dir=folder) as worker:
    report = worker.run(task(1, max_steps=4), lambda: False)
    same = dict(os.environ) == before
    log = Path(report.log).read_text() if report.log else ""
    print(json.dumps({"status": report.status, "reason": report.reason, "same": same, "log": log}), flush=True)
    worker.run(task(2, min_steps=10**6, max_steps=10**6, max_seconds=1e6), lambda: False)
"""


@pytest.fixture
def started(tmp_path: Path) -> Any:
    (tmp_path / "elsewhere").mkdir()
    hidden, script = tmp_path / "elsewhere" / "hidden_source.py", tmp_path / "train.py"
    hidden.write_text(HIDDEN)
    script.write_text(SCRIPT)
    logs = tmp_path / "logs"
    process = subprocess.Popen(
        [sys.executable, str(script), str(logs)],
        env={**os.environ, "HIDDEN": str(hidden), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_a_script_and_ctrl_c(started: Any) -> None:
    line = started.stdout.readline()
    assert line, started.stderr.read()
    told = json.loads(line)
    assert told["status"] == "ok", told["reason"]
    assert told["same"]
    assert "in the trial" in told["log"]
    user = psutil.Process(started.pid)
    limit = time.monotonic() + 20
    while len(below := user.children(recursive=True)) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    assert len(below) == 2
    time.sleep(0.3)
    started.send_signal(signal.SIGINT)
    started.wait(40)
    assert "KeyboardInterrupt" in started.stderr.read()
    assert not [process for process in below if process.is_running()]


EAGER = """
import os, time
import torch
import torch.distributed as dist

if "RANK" in os.environ:
    dist.init_process_group("gloo")
    PLACE = dist.get_rank()
    dist.barrier()
if os.environ.get("BLOCKED_IN", str(os.getpid())) != str(os.getpid()):
    time.sleep(600)

class Net(torch.nn.Linear):
    pass
"""

IMPORTS_IT = """
import os, sys
from pathlib import Path
if len(sys.argv) > 2:
    os.environ["BLOCKED_IN"] = str(os.getpid())
import eager
import torch
from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.process import open_rendezvous
from atorch_ns.engine.trial.worker import TrialWorker
from atorch_ns.job import Inputs
from atorch_ns.search import StopRule, TrialTask

cluster = Cluster.detect()
store, place = open_rendezvous(cluster)
inputs = Inputs(
    model=eager.Net(2, 1), optim_func=torch.optim.SGD, optim_args={"lr": 0.1}, dataset=[torch.ones(2)] * 8,
    loss_func=lambda batch, output: output.mean(), dataloader_args={"batch_size": 4},
)
with TrialWorker(inputs, cluster, rendezvous=place, log_dir=Path(sys.argv[1])) as worker:
    print(worker._process._process.pid, flush=True)
    task = TrialTask(id=1, key="", steps=(("ddp", None),), rule=StopRule(max_steps=2), deadline_s=60)
    report = worker.run(task, lambda: False)
    print(report.status, report.reason, flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def eager(tmp_path: Path) -> Any:
    """Starts a script that imports a module which joins a process group when it is imported."""
    (tmp_path / "eager.py").write_text(EAGER)
    (tmp_path / "train.py").write_text(IMPORTS_IT)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "train.py", str(tmp_path / "logs"), *arguments]
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_module_may_join_a_process_group_when_it_is_imported(eager: Any) -> None:
    process = eager()
    output, errors = process.communicate(timeout=60)
    assert output.split()[1:] == ["ok"], (output, errors)


def test_a_helper_that_blocks_in_an_import_dies_with_its_parent(eager: Any) -> None:
    process = eager("block")
    helper = psutil.Process(int(process.stdout.readline()))
    time.sleep(4)  # until it imports
    process.kill()
    process.wait(10)
    limit = time.monotonic() + 5
    while helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE and time.monotonic() < limit:
        time.sleep(0.05)
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
