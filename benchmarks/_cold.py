"""``python -m benchmarks._cold PLAN SIDE SIZE``: one rank of a cold start; prints the seconds it took."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks._building import build_by_hand, build_ours, plan_named
from benchmarks._llama import SMALL, TINY


def main() -> None:
    """Builds the plan once, in this fresh interpreter."""
    name, side, size = sys.argv[1:]
    plan = plan_named(name)
    model = (TINY if size == "quick" else SMALL).build()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(1))
    build = {"by_hand": build_by_hand, "ours": build_ours}[side]
    wall, cpu = time.perf_counter(), time.process_time()
    kept = build(plan, model)
    seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    print(json.dumps(seconds), flush=True)
    if dist.is_initialized():
        dist.barrier()
    del kept
    os._exit(0)  # a process that holds a device mesh may abort while Python finalises


if __name__ == "__main__":
    main()
