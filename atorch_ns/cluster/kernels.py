"""Kernel rates: what libraries reach on devices, read from ``kernels.csv``, and rings on links, from ``links.csv``.

A product's rate is that of the best shape; what smaller shapes lose is the time in which their operands move, which
:mod:`atorch_ns.estimate.time.passes` adds. Priced so, products of 4096 and 8192 squared are within 7 % of cuBLAS on H100
and B200. Fused attention has rates of its own, by library, pass, width of a head, mask and tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from atorch_ns.system import table_rows

FOLDER: Final = Path(__file__).parent
_CURVES, _WIDTH = "H100", 128
"""Device and width whose rates of attention are known for every length, with a mask and without. Others follow these
curves, from the rates that they have or else from the same share of their products': a library's kernel is one."""
_CUDNN, _FLASH = "cuDNN", "FlashAttention-2"
_SLOWER: Final = {"FlashAttention-1": {"forward": 1.4, "backward": 2.0}}
"""How many times as long as FlashAttention-2 a library takes: Dao 2023, FlashAttention-2, section 4.1, of the kernel in
Triton on A100, 1.3 to 1.5 times in the forward pass and about twice in the backward pass."""
ATTENTION_LIBRARIES: Final = (_CUDNN, _FLASH, *_SLOWER)
"""Libraries of fused attention whose rates are known."""


def usual_attention(device: str) -> str:
    """The library that ``scaled_dot_product_attention`` takes on a device of the table.

    It is cuDNN for compute capabilities 9 and 10 of NVIDIA, with a cuDNN after 9.15 as torch 2.11 brings it (torch,
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``check_prefer_cudnn_attention``).
    """
    return _CUDNN if device in ("H100", "H200", "B200", "GB200") else _FLASH


class SourcedFigure(NamedTuple):
    """A figure with its source.

    Attributes:
        value: the figure, in the unit of the field that holds it.
        source: the title of the data sheet, or what was assumed and why.
    """

    value: float
    source: str


class AttentionKind(NamedTuple):
    """What the rate of a fused attention depends on.

    Attributes:
        passes: ``"forward"`` or ``"backward"``.
        width: features of a head.
        is_causal: whether no token sees a later one.
        num_tokens: tokens of a sample.
    """

    passes: str
    width: int
    is_causal: bool
    num_tokens: int


def product_share(device: str, dtype: str) -> SourcedFigure | None:
    """Share of the peak that the best products reach, ``None`` for a device that the table lacks."""
    row = _find_product_row(device, dtype)
    return None if row is None else SourcedFigure(float(row["tflops"]) / float(row["peak"]), row["source"])


@functools.cache
def attention_share(device: str, library: str, kind: AttentionKind) -> float:
    """Rate of a library's fused attention in 16 bits, over that of the best products; 1 for devices that the table lacks.

    Of causal attention the operations on and below the diagonal are counted. Between lengths of the table rates are
    interpolated in the logarithm; beyond them they stay.
    """
    if _find_product_row(device, "bfloat16") is None:
        return 1.0
    if library in _SLOWER:
        return attention_share(device, _FLASH, kind) / _SLOWER[library][kind.passes]
    width = min((64, _WIDTH), key=lambda each: abs(each - kind.width))  # the nearest width in the table
    rate = _interpolate_rate(_kernel_rates(library, _CURVES, kind.passes, width, False), kind.num_tokens)
    # The cost of a causal mask is known for the forward pass at width 128, and applied to all.
    if kind.is_causal:
        masked, whole = (
            _kernel_rates(library, _CURVES, "forward", _WIDTH, is_causal) for is_causal in (True, False)
        )
        rate *= _interpolate_rate(masked, kind.num_tokens) / _interpolate_rate(whole, kind.num_tokens)
    # Scaled from H100: by the device's best attention rate if known, else by its product rate.
    best = max(_kernel_rates(library, _CURVES, kind.passes, _WIDTH, False).values())
    known = _kernel_rates(library, device, kind.passes, _WIDTH, False)
    row = _find_product_row(device if known else _CURVES, "bfloat16")
    assert row is not None
    return rate * max(known.values(), default=best) / best / float(row["tflops"])


@functools.cache
def _find_product_row(device: str, dtype: str) -> Mapping[str, str] | None:
    wanted = ("product", device, dtype)
    rows = table_rows(FOLDER / "kernels.csv")
    return next((row for row in rows if (row["kernel"], row["device"], row["dtype"]) == wanted), None)


def _interpolate_rate(rates: Mapping[int, float], num_tokens: int) -> float:
    lengths = sorted(rates)
    return float(np.interp(np.log(num_tokens), np.log(lengths), [rates[length] for length in lengths]))


@functools.cache
def _kernel_rates(library: str, device: str, passes: str, width: int, is_causal: bool) -> Mapping[int, float]:
    """TFLOP/s by tokens."""
    wanted = (f"attention {passes}", library, device, str(width), "yes" if is_causal else "no")
    return {
        int(row["tokens"]): float(row["tflops"])
        for row in table_rows(FOLDER / "kernels.csv")
        if tuple(row[key] for key in ("kernel", "library", "device", "width", "causal")) == wanted
    }
