"""ATorch 0.2.5, in an environment and in processes of its own.

It needs an older safetensors than this project, and importing it changes torch for everybody in the process. So
every rank here has a rank of ATorch beside it, and drives it through a pipe: the two take turns like any others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from atorch_ns.testing import reserve_port
from benchmarks._llama import Llama
from benchmarks._peers._beside import Beside, environment, python_of, rank_variables
from benchmarks._peers._peer import NUM_RANKS, Peer, Task, Trainer

__all__ = ["ATORCH"]

# What it imports; it declares more, some of which no longer installs.
_INSTALLS = (
    ("torch==2.13.0", "setuptools", "wheel", "safetensors<0.8", "transformers>=5,<6", "protobuf<8"),
    ("numpy", "pandas", "psutil", "networkx", "grpcio", "einops", "pynvml"),
    ("--no-deps", "--no-build-isolation", "fairscale==0.4.13"),
    ("--no-deps", "atorch==0.2.5"),
)


def _environment(rank: int, ports: tuple[int, int]) -> dict[str, str]:
    # Names of its own that its launcher would set.
    names = {"NPROC_PER_NODE": NUM_RANKS, "NODE_SIZE": 1, "COWORKER_SIZE": 0, "MASTER_PORT2": ports[1]}
    return {
        **rank_variables(rank, NUM_RANKS, ports[0]),
        **{name: str(value) for name, value in names.items()},
    }


def _start(task: Task, size: Llama, num_tokens: int, rank: int) -> Callable[[], Trainer]:
    with reserve_port() as first, reserve_port() as second:
        ports: list[Any] = [(first, second)]
        dist.broadcast_object_list(ports, src=0)
        size_text = json.dumps(asdict(size))
        arguments = ["-m", "benchmarks._peers._atorch_rank", task.name, size_text, str(num_tokens)]
        beside = Beside("ATorch", python_of("atorch"), arguments, _environment(rank, ports[0]))
        beside.answer()

    def build() -> Trainer:
        beside.ask("build")
        return Trainer(step=lambda: float(beside.ask("step")["loss"]), cpu_s=lambda: beside.cpu_s)

    return build


ATORCH = Peer(
    name="ATorch", start=_start, prepare=lambda: environment("atorch", _INSTALLS), tracks_memory=False
)
