"""Benchmark of collectives: each rank's program, ``python -m atorch_ns.doctor.benchmark FOLDER SECONDS``.

Each rank times a matrix product and all-reduces over all ranks, within and between nodes and over each link.
Rank 0 measures the clocks' offsets from its own. Figures go to ``FOLDER/figures_RANK``. ``FOLDER/steps_RANK``
gets a line before each step, so that a rank that hangs or dies leaves its last step.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented; not in __all__

from atorch_ns.doctor.rank_info import Who, open_store
from atorch_ns.system import write_whole

_NUM_BYTES: Final = 16 * 2**20
_REPEATS: Final = 5  # timed runs after one warm-up run
_CLOCK_REPEATS: Final = 8  # the shortest round trip counts
_READINGS: Final = 1000  # consecutive readings of this rank's clock
_PRODUCT_SIZES: Final = {"cpu": 512, "cuda": 4096}  # rows of square matrices


def main() -> None:
    """Joins the other ranks, measures, and leaves the figures in the folder."""
    folder, limit = Path(sys.argv[1]), timedelta(seconds=float(sys.argv[2]))
    who = Who.detect()
    assert who is not None
    with (folder / f"steps_{who.rank}").open("a", buffering=1) as steps:  # line by line: it may be killed
        steps.write("start\n")
        store = PrefixStore("benchmark", open_store(who, timeout_s=limit.total_seconds()))
        dist.init_process_group("gloo", store=store, rank=who.rank, world_size=who.world_size, timeout=limit)
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        backends = ["gloo"]
        if num_gpus >= who.local_world_size:  # NCCL takes a GPU for each rank
            torch.cuda.set_device(who.local_rank)
            backends.append("nccl")
        figures: dict[str, Any] = {
            "num_gpus": num_gpus,
            "backends": {backend: _sweep_groups(who, backend, limit, steps.write) for backend in backends},
            "clocks": _compare_clocks(who),
            "product_s": _product_s("cuda" if "nccl" in backends else "cpu"),
        }
        write_whole(folder / f"figures_{who.rank}", json.dumps(figures), durable=False)
        dist.barrier()  # nobody leaves while others measure
        dist.destroy_process_group()


def _sweep_groups(who: Who, backend: str, limit: timedelta, note: Callable[[str], object]) -> dict[str, Any]:

    @functools.cache  # by gloo, a group is its own gate
    def group(ranks: tuple[int, ...], backend: str) -> Any:
        return dist.new_group(list(ranks), limit, backend)

    results: dict[str, Any] = {"links": {}}  # links by the node at the other end
    for name, groups in _plan_rounds(who):
        note(f"{name} by {backend}\n")
        # Names the ranks that do not answer, while the others still can.
        dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
        pairs = {ranks: (group(ranks, backend), group(ranks, "gloo")) for ranks in groups}  # by all ranks
        for ranks, (summing, gate) in pairs.items():
            if who.rank in ranks:
                figures = _all_reduce(backend, summing, gate)
                if name == "links":
                    other = next(rank for rank in ranks if rank != who.rank)
                    results["links"][str(other // who.local_world_size)] = figures
                else:
                    results[name] = figures
    return results


def _plan_rounds(who: Who) -> list[tuple[str, list[tuple[int, ...]]]]:
    # Groups of one round share no rank, so that they can be measured at the same time.
    num_nodes = who.num_nodes
    rounds = [("all", [tuple(range(who.world_size))])]
    if who.local_world_size > 1 and num_nodes > 1:
        rounds.append(("within", [tuple(who.ranks_of(node)) for node in range(num_nodes)]))
    if num_nodes > 1:
        rounds.append(("between", [who.leaders]))
        leaders = who.leaders
        ring = [(leaders[node], leaders[(node + 1) % num_nodes]) for node in range(num_nodes)]
        ring = ring if num_nodes > 2 else ring[:1]  # two nodes have one link
        even = num_nodes - num_nodes % 2
        turns = [ring[0:even:2], ring[1:even:2], ring[even:]]  # the last closes a ring of odd length
        rounds += [("links", list(turn)) for turn in turns if turn]
    return rounds


def _all_reduce(backend: str, group: Any, gate: Any) -> dict[str, float]:
    """Latency of one number and bandwidth of 16 MiB, medians; raises RuntimeError if the sum is wrong."""
    device, size = "cuda" if backend == "nccl" else "cpu", dist.get_world_size(group)
    small, large = torch.ones(1, device=device), torch.ones(_NUM_BYTES // 4, device=device)
    total = small.clone()
    dist.all_reduce(total, group=group)
    if float(total) != size:
        raise RuntimeError(f"{size} ones add up to {float(total)} on {device}")

    def times(tensor: torch.Tensor) -> list[float]:
        return _time_repeats(
            lambda: dist.all_reduce(tensor, group=group), device, before=lambda: dist.barrier(group=gate)
        )

    latencies_s, times_s = times(small), times(large)
    return {
        "latency_s": statistics.median(latencies_s),
        "bytes_per_s": _NUM_BYTES / statistics.median(times_s),  # of the tensor, not of what is sent
        "best_bytes_per_s": _NUM_BYTES / min(times_s),
        "num_bytes": _NUM_BYTES,
        "n": _REPEATS,
    }


def _product_s(device: str) -> float:
    matrix = torch.ones(_PRODUCT_SIZES[device], _PRODUCT_SIZES[device], device=device)
    return min(_time_repeats(lambda: matrix @ matrix, device))  # the fastest is disturbed least


def _time_repeats(
    action: Callable[[], Any], device: str, before: Callable[[], Any] | None = None
) -> list[float]:
    times = []
    for _ in range(_REPEATS + 1):  # the first one warms up
        if before is not None:
            before()
        began = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]


def _compare_clocks(who: Who) -> dict[str, Any]:
    """Clock offsets relative to rank 0, measured by rank 0, and whether this rank's clock ran backwards."""
    readings = [time.time() for _ in range(_READINGS)]
    monotonic = all(later >= earlier for earlier, later in itertools.pairwise(readings))
    ahead: dict[str, float] = {"0": 0.0}
    uncertainty = 0.0
    for peer in who.leaders[1:]:
        if who.rank == 0:
            half, offset = min(_clock_offset(peer) for _ in range(_CLOCK_REPEATS))  # shortest trip
            ahead[str(peer // who.local_world_size)] = offset
            uncertainty = max(uncertainty, half)
        elif who.rank == peer:
            for _ in range(_CLOCK_REPEATS):
                dist.recv(torch.empty(1), 0)  # rank 0 asks
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    return {"monotonic": monotonic, "ahead_s": ahead, "uncertainty_s": uncertainty}


def _clock_offset(peer: int) -> tuple[float, float]:
    answer = torch.empty(1, dtype=torch.float64)
    began, watch = time.time(), time.perf_counter()  # wall clock to compare, monotonic clock to measure
    dist.send(torch.empty(1), peer)
    dist.recv(answer, peer)
    half = (time.perf_counter() - watch) / 2
    return half, float(answer) - (began + half)  # answered in the middle of the trip


if __name__ == "__main__":
    main()
