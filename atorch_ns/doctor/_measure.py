"""How long collectives, messages and products take; called by ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = ["measure_all_reduce", "measure_link", "measure_product"]

_NUM_BYTES: Final = 16 * 2**20
_REPEATS: Final = 5
_PRODUCT_SIZES: Final = {"cpu": 512, "cuda": 4096}


def measure_all_reduce(device: str, group: Any = None, gate: Any = None) -> dict[str, float]:
    """Latency of one number and bandwidth of 16 MiB, medians over 5; bytes of the tensor over seconds.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        group: whose ranks sum; ``None`` for all.
        gate: a gloo group of the same ranks, at whose barrier they begin together; ``None`` for all.

    Raises:
        RuntimeError: if the sum is wrong.
    """
    size = dist.get_world_size(group)
    small, large = torch.ones(1, device=device), torch.ones(_NUM_BYTES // 4, device=device)
    total = small.clone()
    dist.all_reduce(total, group=group)
    if float(total) != size:
        raise RuntimeError(f"{size} ones add up to {float(total)} on {device}")

    def seconds(tensor: torch.Tensor) -> list[float]:
        value = tensor.clone()
        return _times(
            lambda: dist.all_reduce(value, group=group), device, before=lambda: dist.barrier(group=gate)
        )

    return _figures(seconds(small), seconds(large))


def measure_link(device: str, peer: int, group: Any = None) -> dict[str, float]:
    """A message to another rank and back, in halves; both call it.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        peer: the other rank.
        group: to which both belong.
    """

    def seconds(size: int) -> list[float]:
        value = torch.ones(size, device=device)

        def there_and_back() -> None:
            if dist.get_rank() < peer:
                dist.send(value, peer, group=group)
                dist.recv(value, peer, group=group)
            else:
                dist.recv(value, peer, group=group)
                dist.send(value, peer, group=group)

        return [each / 2 for each in _times(there_and_back, device)]

    return _figures(seconds(1), seconds(_NUM_BYTES // 4))


def measure_product(device: str) -> float:
    """Seconds of a matrix product in float32, the fastest of 5."""
    size = _PRODUCT_SIZES[device]
    matrix = torch.ones(size, size, device=device)
    return min(_times(lambda: matrix @ matrix, device))


def _figures(latencies_s: list[float], times_s: list[float]) -> dict[str, float]:
    return {
        "latency_s": statistics.median(latencies_s),
        "bytes_per_s": _NUM_BYTES / statistics.median(times_s),
        "best_bytes_per_s": _NUM_BYTES / min(times_s),
        "num_bytes": _NUM_BYTES,
        "n": _REPEATS,
    }


def _times(action: Callable[[], Any], device: str, before: Callable[[], Any] | None = None) -> list[float]:
    times = []
    for _ in range(_REPEATS + 1):
        if before is not None:
            before()
        began = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]
