"""Help of every verb: light, with one example that works."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from atorch_ns import Strategy
from atorch_ns.report import TrainingReport
from atorch_ns.search import History
from tests.cli.conftest import JOB, Run
from tests.cli.verbs import VERBS, commands
from tests.report.outcomes import searched
from tests.search.fakes import World
from tests.search.history.test_history import CANDIDATES, TRUTH, begin
from tests.warm import COLD_PYTHON

_CODE = "from atorch_ns.cli import main; main()"
_READING = set(VERBS) - {"launch", "train", "engine serve"}
"""Verbs whose answer a program may want to read; the others have a program's output, or run until they are ended."""
_FEWER = {
    "search": ["--max-trials", "1"],
    "calibrate": ["--seconds", "0.1"],
    "doctor": ["--only", "disk"],
    "plan": ["--top", "1"],
}
"""Said with an example, for it to end soon."""
_CODES = {"diff": 1, "strategy diff": 1}
"""Exit codes that are an answer."""


def _example(verb: str) -> str:
    found = re.findall(r"Example: (atorch-ns .*)", commands()[verb].help or "")
    assert len(found) == 1, f"{verb} has {len(found)} examples"
    return str(found[0])


@pytest.mark.parametrize("verb", VERBS)
def test_one_example_and_json(verb: str) -> None:
    assert _example(verb).startswith(f"atorch-ns {verb}")
    options = {name for parameter in commands()[verb].params for name in parameter.opts}
    assert ("--json" in options) == (verb in _READING)
    for parameter in commands()[verb].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            assert parameter.help, f"{verb} {parameter.name} says nothing"  # type: ignore[attr-defined]


def test_no_help_imports_torch() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from atorch_ns.cli import main\n"
        f"for verb in {list(VERBS)!r}:\n"
        "    sys.argv = ['atorch-ns', *verb.split(), '--help']\n"
        "    written = io.StringIO()\n"
        "    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "    assert 'Example:' in written.getvalue(), verb\n"
        "print(sorted({'torch', 'numpy', 'optuna', 'grpc'} & set(sys.modules)))\n"
    )
    done = subprocess.run([COLD_PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def _cpu_seconds(code: str) -> float:
    """CPU time of a fresh interpreter, the least of three: what else runs on the machine costs wall time only."""
    timed = f"import time, sys\n{code}\nprint(time.process_time(), file=sys.stderr)"
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [COLD_PYTHON, "-c", timed], capture_output=True, text=True, timeout=60, check=True
        )
        seconds.append(float(done.stderr.split()[-1]))
    return min(seconds)


def test_help_takes_half_a_second_at_most() -> None:
    code = (
        "sys.argv = ['atorch-ns', '--help']\n"
        "from atorch_ns.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
    )
    assert _cpu_seconds(code) < 0.5


def test_the_package_takes_a_third_of_a_second_beyond_torch() -> None:
    assert _cpu_seconds("import atorch_ns") < 0.3


TRAINED = """
import torch
from torch import nn


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).square().mean()


class Numbers:
    def __init__(self, size):
        self.size = size

    def __getitem__(self, place):
        return torch.full((4,), float(place))

    def __len__(self):
        return self.size
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file that an example names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(JOB.replace("torch.zeros(4, 32)", "torch.ones(4, 32)"))
    (tmp_path / "script.py").write_text("print('trained')\n")
    Strategy(["fsdp"]).save(tmp_path / "strategy.json")
    Strategy(["fsdp"]).save(tmp_path / "old.json")
    Strategy(["zero1"]).save(tmp_path / "new.json")
    TrainingReport(search=searched()).save(tmp_path / "report.json")
    config = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 2}
    (tmp_path / "config.yaml").write_text(
        "max_train_steps: 2\nmodel: {type: job.Trained}\noptimizer: {type: torch.optim.SGD, args: {lr: 0.1}}\n"
        "dataset: {type: job.Numbers, train_args: {size: 4}}\n"
    )
    (tmp_path / "job.py").write_text(TRAINED)
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(config))
    world, history = World(TRUTH), History(tmp_path / "history.journal")
    history.conclude(world.search(CANDIDATES, search=begin(world, history)))
    return tmp_path


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("launch", "engine serve")])
def test_the_example_runs(folder: Path, run: Run, inline_ranks: None, verb: str) -> None:
    torch.manual_seed(0)
    try:
        done = run(*shlex.split(_example(verb))[1:], *_FEWER.get(verb, []))
    finally:
        sys.modules.pop("train", None)
        sys.modules.pop("job", None)
    assert done.returncode == _CODES.get(verb, 0), done.stderr
    assert done.stdout or "report written to" in done.stderr


def test_the_example_of_launch_runs(folder: Path) -> None:
    arguments = shlex.split(_example("launch"))[1:]
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


def test_the_example_of_serve_runs(folder: Path) -> None:
    arguments = shlex.split(_example("engine serve"))[1:]
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        assert "127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
