"""ATorch 0.2.5, in an environment and in processes of its own.

It needs an older safetensors than this project, and importing it changes torch for everybody in the process. So
every rank here has a rank of ATorch beside it, and drives it through a pipe: the two take turns like any others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from atorch_ns.testing import reserve_port
from benchmarks._llama import Llama
from benchmarks._peers._peer import NUM_RANKS, Peer, Task, Trainer

__all__ = ["ATORCH", "FOLDER"]

FOLDER = Path(os.environ.get("BENCHMARK_PEERS", Path(__file__).parent.parent / ".peers"))
"""Where the environment is made, if it is not there: ``BENCHMARK_PEERS``, or a folder that git ignores."""

_ROOT = Path(__file__).parent.parent.parent
# What it imports; it declares more, some of which no longer installs.
_INSTALLS = (
    ("torch==2.13.0", "setuptools", "wheel", "safetensors<0.8", "transformers>=5,<6", "protobuf<8"),
    ("numpy", "pandas", "psutil", "networkx", "grpcio", "einops", "pynvml"),
    ("--no-deps", "--no-build-isolation", "fairscale==0.4.13"),
    ("--no-deps", "atorch==0.2.5"),
)


def _python() -> Path:
    return FOLDER / "atorch" / "bin" / "python"


def _prepare() -> str:
    """Makes the environment, which takes minutes; the reason if that fails."""
    python, made = _python(), FOLDER / "atorch" / "made"
    if made.exists():
        return ""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n", encoding="utf-8")
    commands = [[sys.executable, "-m", "venv", str(python.parent.parent)]]
    commands += [[str(python), "-m", "pip", "install", "-q", *packages] for packages in _INSTALLS]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [str(done.returncode)]
            return f"its environment could not be made: {said[-1]}"
    made.touch()
    return ""


class _Beside:
    """A rank of ATorch."""

    def __init__(self, task: Task, size: Llama, num_tokens: int, rank: int, ports: tuple[int, int]) -> None:
        module = "benchmarks._peers._atorch_rank"
        self._process = subprocess.Popen(
            [str(_python()), "-m", module, task.name, json.dumps(asdict(size)), str(num_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=_environment(rank, ports),
        )
        self.cpu_s = 0.0
        self._answer()

    def ask(self, command: str) -> Mapping[str, Any]:
        """Its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"ATorch's process ended with exit code {self._process.wait()}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.cpu_s = float(answer.get("cpu_s", 0.0))
        return answer


def _environment(rank: int, ports: tuple[int, int]) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
    # Names of its own that its launcher would set.
    names |= {"NPROC_PER_NODE": NUM_RANKS, "NODE_SIZE": 1, "COWORKER_SIZE": 0}
    names |= {"MASTER_PORT": ports[0], "MASTER_PORT2": ports[1]}
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return {**kept, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}


def _start(task: Task, size: Llama, num_tokens: int, rank: int) -> Callable[[], Trainer]:
    with reserve_port() as first, reserve_port() as second:
        ports: list[Any] = [(first, second)]
        dist.broadcast_object_list(ports, src=0)
        beside = _Beside(task, size, num_tokens, rank, ports[0])

    def build() -> Trainer:
        beside.ask("build")
        return Trainer(step=lambda: float(beside.ask("step")["loss"]), cpu_s=lambda: beside.cpu_s)

    return build


ATORCH = Peer(name="ATorch", start=_start, prepare=_prepare, tracks_memory=False)
