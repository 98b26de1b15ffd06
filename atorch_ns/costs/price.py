"""Price of computation: seconds of operators on a device, from their operations and the bytes they move."""

from __future__ import annotations

from typing import Final

import numpy as np

from atorch_ns.cluster import AttentionKind, Device
from atorch_ns.costs.count import OperatorCounts

Amount = np.ndarray | float

_EAGER_STREAM: Final = 0.87
"""Rate at which torch's own kernels stream memory, over that of triads and copies: its layer norm reaches
2.70 TB/s on an H100 whose triads reach 3.08 (benchmarks of pauliano22/triton-gpu-kernels, 2025)."""


def kernel_seconds(
    device: Device,
    dtype: str,
    *,
    products: Amount,
    operands: Amount,
    moved: Amount,
    attention: Amount = 0.0,
    kind: AttentionKind | None = None,
    is_compiled: bool = False,
) -> np.ndarray:
    """Seconds of computation, without starting the operators.

    A product takes the time of both: its operations at the rate of the best products, and moving its
    operands, of which smaller products have more per operation. On a CPU operands move faster than new
    results, whose memory is mapped first.

    Args:
        dtype: dtype of the products, as torch names it.
        products, attention: floating point operations, as :class:`~atorch_ns.costs.OperatorCounts` has them.
        operands, moved: bytes, likewise.
        kind: kind of the attention, which sets its rate; not needed without attention.
        is_compiled: whether a compiler has made the kernels that only move memory.
    """
    stream = device.memory_bytes_per_s * (1.0 if is_compiled or device.type == "cpu" else _EAGER_STREAM)
    seconds = products / device.products_of(dtype) + operands / device.update_bytes_per_s + moved / stream
    if kind is not None:
        seconds = seconds + attention / device.attention_of(dtype, kind)
    return np.asarray(seconds)


def counted_seconds(
    device: Device, dtype: str, counts: OperatorCounts, passes: str, *, share: float = 1.0, part: float = 1.0
) -> float:
    """Seconds of the operators of one pass, with starting them where a CPU does.

    Args:
        passes: ``"forward"`` or ``"backward"``.
        share: share of the operations that one rank computes.
        part: part of the bytes that one rank moves.
    """
    seconds = kernel_seconds(
        device,
        dtype,
        products=share * counts.products,
        operands=part * counts.operands,
        moved=part * counts.moved,
        attention=share * counts.attention,
        kind=counts.attention_kind(passes) if counts.attention else None,
    )
    return float(seconds + host_seconds(device, counts.num_operators, np.inf))


def host_seconds(device: Device, num_operators: Amount, device_seconds: Amount) -> np.ndarray:
    """Seconds of starting operators that nothing hides.

    A GPU runs behind its host, so only the host's time beyond ``device_seconds`` counts; a CPU is the host.
    """
    host = num_operators * device.launch_s
    return np.asarray(host if device.type == "cpu" else np.maximum(0.0, host - device_seconds))
