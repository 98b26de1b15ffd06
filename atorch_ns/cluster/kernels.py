"""Kernel rates: of libraries on devices (``kernels.csv``), and of rings on links (``links.csv``).

A product's rate is that of the best shape. Smaller shapes lose the time in which their operands move, which
:mod:`atorch_ns.estimate.time.passes` adds. Products of 4096 and 8192 squared are then within 7 % of cuBLAS on
H100 and B200. Fused attention has rates of its own, by library, pass, width of a head, mask and tokens.
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
"""Device and width with rates of attention for every length, with and without a mask. Others follow these
curves, scaled by their own rates, or else by those of products, since the library's kernel is the same."""
_CUDNN, _FLASH = "cuDNN", "FlashAttention-2"
_SLOWER: Final = {"FlashAttention-1": {"forward": 1.4, "backward": 2.0}}
"""Time of a library over that of FlashAttention-2 (Dao 2023, FlashAttention-2, section 4.1, of the kernel in
Triton on A100: 1.3 to 1.5 times in the forward pass and about twice in the backward pass)."""
ATTENTION_LIBRARIES: Final = (_CUDNN, _FLASH, *_SLOWER)
"""Libraries of fused attention whose rates are known."""


def usual_attention(device: str) -> str:
    """The library that ``scaled_dot_product_attention`` takes on a device of the table.

    That is cuDNN for NVIDIA's compute capabilities 9 and 10, with a cuDNN after 9.15 such as torch 2.11's
    (torch, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``check_prefer_cudnn_attention``).
    """
    return _CUDNN if device in ("H20", "H100", "H200", "B200", "B300", "GB200", "GB300") else _FLASH


class SourcedFigure(NamedTuple):
    """A figure with its source.

    Attributes:
        value: the figure, in the unit of the field that holds it.
        source: the title of the data sheet, or what was assumed and why.
    """

    value: float
    source: str


class AttentionKind(NamedTuple):
    """The parameters that determine the rate of fused attention.

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
    """Rate of a library's 16-bit fused attention over that of the best products; 1 for unlisted devices.

    Causal attention counts operations on and below the diagonal. Rates are interpolated in the logarithm of
    the length between entries of the table, and constant beyond them.
    """
    if _find_product_row(device, "bfloat16") is None:
        return 1.0
    if library in _SLOWER:
        return attention_share(device, _FLASH, kind) / _SLOWER[library][kind.passes]
    width = min((64, _WIDTH), key=lambda each: abs(each - kind.width))  # the nearest width in the table
    rate = _interpolate_rate(
        _kernel_rates(library, _CURVES, kind.passes, width, is_causal=False), kind.num_tokens
    )
    # The cost of a causal mask is known for the forward pass at width 128. It is used for all cases.
    if kind.is_causal:
        causal, whole = (
            _kernel_rates(library, _CURVES, "forward", _WIDTH, is_causal=is_causal)
            for is_causal in (True, False)
        )
        rate *= _interpolate_rate(causal, kind.num_tokens) / _interpolate_rate(whole, kind.num_tokens)
    # Scaled from H100: by the device's attention rate of the longest samples if known, else by its product rate.
    curve = _kernel_rates(library, _CURVES, kind.passes, _WIDTH, is_causal=False)
    own_rates = _kernel_rates(library, device, kind.passes, _WIDTH, is_causal=False)
    length, longest_rate = max((own_rates or curve).items())
    row = _find_product_row(device if own_rates else _CURVES, "bfloat16")
    assert row is not None
    return rate * longest_rate / _interpolate_rate(curve, length) / float(row["tflops"])


@functools.cache
def _find_product_row(device: str, dtype: str) -> Mapping[str, str] | None:
    values = ("product", device, dtype)
    rows = table_rows(FOLDER / "kernels.csv")
    return next((row for row in rows if (row["kernel"], row["device"], row["dtype"]) == values), None)


def _interpolate_rate(rates: Mapping[int, float], num_tokens: int) -> float:
    lengths = sorted(rates)
    return float(np.interp(np.log(num_tokens), np.log(lengths), [rates[length] for length in lengths]))


@functools.cache
def _kernel_rates(
    library: str, device: str, passes: str, width: int, *, is_causal: bool
) -> Mapping[int, float]:
    """TFLOP/s by tokens."""
    values = (f"attention {passes}", library, device, str(width), "yes" if is_causal else "no")
    return {
        int(row["tokens"]): float(row["tflops"])
        for row in table_rows(FOLDER / "kernels.csv")
        if tuple(row[key] for key in ("kernel", "library", "device", "width", "causal")) == values
    }
