"""What each rank of the check of collectives does; started as a module."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from atorch_ns.doctor._measure import measure_all_reduce

__all__ = ["main"]

_READINGS: Final = 1000


def main() -> None:
    """Sums tensors over all ranks; rank 0 writes what it took."""
    answer, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpus = num_gpus >= _world_size()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    backends = {"gloo": measure_all_reduce("cpu")}
    if on_gpus:
        torch.cuda.set_device(dist.get_rank())
        backends["nccl"] = measure_all_reduce("cuda", dist.new_group(backend="nccl"))
    found: dict[str, Any] = {"backends": backends, "num_gpus": num_gpus, **_clocks()}
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _clocks() -> dict[str, Any]:
    """How far the ranks' clocks are apart, less what the barrier may take; and whether one ran backwards."""
    readings = [time.time() for _ in range(_READINGS)]
    monotonic = all(later >= earlier for earlier, later in itertools.pairwise(readings))
    began = time.perf_counter()
    dist.barrier()
    now, uncertainty = time.time(), time.perf_counter() - began
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (now, monotonic, uncertainty))
    times = [reading for reading, _, _ in gathered]
    slack = max(each for _, _, each in gathered)
    return {
        "skew_s": max(0.0, max(times) - min(times) - slack),
        "monotonic": all(fine for _, fine, _ in gathered),
    }


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main()
