"""Probes of the links between ranks: each collective at several sizes, and how well it hides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from atorch_ns.cluster._compute_speed import wait_for
from atorch_ns.cluster._hardware import Rate

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["RING_STEPS", "fit_rates", "link_probes", "measured_overlap"]

RING_STEPS: Final[Mapping[str, int]] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "reduce": 1,
    "all_to_all": 1,
    "send": 1,
}
"""How often a ring passes the whole tensor around: in a ring of n ranks each sends this many times n - 1
messages of 1/n of the tensor."""

_MEASURED: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_NUM_BYTES: Final = {"cpu": (2**12, 2**17, 2**20, 2**22), "cuda": (2**14, 2**20, 2**24, 2**27)}
_REPEATS: Final = {"cpu": (4, 3, 2, 2), "cuda": (10, 5, 3, 2)}
_OVERLAP_BYTES: Final = {"cpu": 2**22, "cuda": 2**27}


def link_probes(group: dist.ProcessGroup, device: str) -> dict[str, Callable[[], float]]:
    """What to time, by a name that :func:`fit_rates` and :func:`measured_overlap` read."""
    kind = device.partition(":")[0]
    probes: dict[str, Callable[[], float]] = {}
    for collective in _MEASURED:
        for num_bytes, repeats in zip(_NUM_BYTES[kind], _REPEATS[kind], strict=True):
            start = _starter(collective, num_bytes, group, device)
            if start is not None:
                probes[f"{collective}/{num_bytes}"] = _timed_together(start, repeats, group, device)
    return probes | _overlap_probes(_OVERLAP_BYTES[kind], group, device)


def fit_rates(times: Mapping[str, float], num_ranks: int) -> dict[str, Rate]:
    """α and β of every collective by least squares over its sizes, each error relative to its time.

    Args:
        times: median seconds by ``"<collective>/<bytes>"``; other names are passed over.
        num_ranks: of the ring.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for name, seconds in times.items():
        collective, _, num_bytes = name.partition("/")
        if collective in RING_STEPS and num_bytes.isdecimal():
            points.setdefault(collective, []).append((float(num_bytes), seconds))
    return {
        name: _fit(RING_STEPS[name] * (num_ranks - 1), num_ranks, found) for name, found in points.items()
    }


def measured_overlap(times: Mapping[str, float]) -> float:
    """Share of a collective's time that ran beside a computation of about its length: 0 to 1."""
    alone, computing, both = (times[f"overlap/{what}"] for what in ("alone", "computing", "both"))
    return float(np.clip((alone + computing - both) / min(alone, computing), 0.0, 1.0))


def _fit(messages: int, num_ranks: int, points: list[tuple[float, float]]) -> Rate:
    sizes, seconds = (np.asarray(values) for values in zip(*points, strict=True))
    columns = np.stack([np.full(len(sizes), messages), messages * sizes / num_ranks], axis=1)
    weights = 1 / seconds
    solution, *_ = np.linalg.lstsq(columns * weights[:, None], np.ones(len(sizes)), rcond=None)
    # Noise can make either negative; no message is free, and none is faster than the largest that was seen.
    latency = max(float(solution[0]), 0.1 * float(seconds.min()) / messages)
    slowest = 0.2 * float(seconds[-1]) / (messages * float(sizes[-1]) / num_ranks)
    return Rate(latency, 1 / max(float(solution[1]), slowest))


def _starter(
    collective: str, num_bytes: int, group: dist.ProcessGroup, device: str
) -> Callable[[bool], Any] | None:
    """Starts a collective on whole tensors of that size; ``None`` where the backend has none."""
    import torch
    import torch.distributed as dist

    num_ranks = dist.get_world_size(group)
    each = max(1, num_bytes // 4 // num_ranks)
    whole, part = torch.zeros(each * num_ranks, device=device), torch.zeros(each, device=device)
    other = torch.zeros_like(whole)
    first = dist.get_process_group_ranks(group)[0]
    # torch 2.13 gave these two shorter names; the old ones warn.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    starters: dict[str, Callable[[bool], Any]] = {
        "all_reduce": lambda later: dist.all_reduce(whole, group=group, async_op=later),
        "all_gather": lambda later: gather(whole, part, group=group, async_op=later),
        "reduce_scatter": lambda later: scatter(part, whole, group=group, async_op=later),
        "broadcast": lambda later: dist.broadcast(whole, src=first, group=group, async_op=later),
        "all_to_all": lambda later: dist.all_to_all_single(other, whole, group=group, async_op=later),
    }
    start = starters[collective]
    try:
        start(False)
    except (RuntimeError, NotImplementedError):  # on every rank alike: the backend lacks it
        return None
    return start


def _timed_together(
    start: Callable[[bool], Any], repeats: int, group: dist.ProcessGroup, device: str
) -> Callable[[], float]:
    import torch.distributed as dist

    def probe() -> float:
        dist.barrier(group=group)
        wait_for(device)
        started = time.perf_counter()
        for _ in range(repeats):
            start(False)
        wait_for(device)
        return (time.perf_counter() - started) / repeats

    return probe


def _overlap_probes(num_bytes: int, group: dist.ProcessGroup, device: str) -> dict[str, Callable[[], float]]:
    """A collective alone, products of about its length alone, and both at once."""
    import torch
    import torch.distributed as dist

    communicate = _starter("all_reduce", num_bytes, group, device)
    assert communicate is not None
    size = 256 if device == "cpu" else 2048
    left = torch.ones(size, size, device=device)
    alone = _timed_together(communicate, 2, group, device)
    for _ in range(2):
        seconds = alone()
    started = time.perf_counter()
    for _ in range(4):
        torch.mm(left, left)
    wait_for(device)
    products = torch.tensor([seconds / max((time.perf_counter() - started) / 4, 1e-7)], device=device)
    dist.all_reduce(products, op=dist.ReduceOp.MIN, group=group)
    repeats = int(np.clip(float(products), 1, 1000))

    def compute(later: bool) -> None:
        for _ in range(repeats):
            torch.mm(left, left)

    def both(later: bool) -> None:
        work = communicate(True)
        compute(False)
        work.wait()

    return {
        "overlap/alone": alone,
        "overlap/computing": _timed_together(compute, 2, group, device),
        "overlap/both": _timed_together(both, 2, group, device),
    }
