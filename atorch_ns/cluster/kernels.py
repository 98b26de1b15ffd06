"""Kernel rates: floating point operations a second that libraries reach on devices, read from ``kernels.csv``.

A product's rate is that of the best shape; what smaller shapes lose is the time in which their operands move, which
:mod:`atorch_ns.estimate.time.passes` adds. Priced so, products of 4096 and 8192 squared are within 7 % of cuBLAS on H100
and B200. Fused attention has rates of its own, by pass, width of a head, mask and tokens.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

_FILE: Final = Path(__file__).with_name("kernels.csv")
_CURVES, _WIDTH = "H100", 128
"""Device and width whose rates of attention are known for every length, with a mask and without. Others follow these
curves from the rates that they have: FlashAttention-2 is one kernel."""


class Figure(NamedTuple):
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


@functools.cache
def product_rate(device: str, dtype: str) -> Figure | None:
    """FLOP/s of the best products, ``None`` for a device that the table lacks."""
    for row in _rows():
        if (row["kernel"], row["device"], row["dtype"]) == ("product", device, dtype):
            return Figure(float(row["tflops"]) * 1e12, row["source"])
    return None


@functools.cache
def attention_share(device: str, kind: AttentionKind) -> float:
    """Rate of fused attention in 16 bits, over that of the best products; 1 for devices that the table lacks.

    Of causal attention the operations on and below the diagonal are counted. Between lengths of the table rates are
    interpolated in the logarithm; beyond them they stay.
    """
    products, known = product_rate(device, "bfloat16"), _attention(device, kind.passes, _WIDTH, False)
    if products is None or not known:
        return 1.0
    width = min((64, _WIDTH), key=lambda each: abs(each - kind.width))
    rate = _at(_attention(_CURVES, kind.passes, width, False), kind.num_tokens)
    if kind.is_causal:
        masked, whole = (_attention(_CURVES, "forward", _WIDTH, is_causal) for is_causal in (True, False))
        rate *= _at(masked, kind.num_tokens) / _at(whole, kind.num_tokens)
    best = max(_attention(_CURVES, kind.passes, _WIDTH, False).values())
    return rate * max(known.values()) / best / products.value


def _at(rates: Mapping[int, float], num_tokens: int) -> float:
    lengths = sorted(rates)
    return float(np.interp(np.log(num_tokens), np.log(lengths), [rates[length] for length in lengths]))


@functools.cache
def _attention(device: str, passes: str, width: int, is_causal: bool) -> Mapping[int, float]:
    """FLOP/s by tokens."""
    wanted = (f"attention {passes}", device, str(width), "yes" if is_causal else "no")
    return {
        int(row["tokens"]): float(row["tflops"]) * 1e12
        for row in _rows()
        if (row["kernel"], row["device"], row["width"], row["causal"]) == wanted
    }


@functools.cache
def _rows() -> tuple[Mapping[str, str], ...]:
    with _FILE.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))
