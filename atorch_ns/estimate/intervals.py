"""Intervals of predictions: how far runs of a class were from their predictions, read from ``residuals.csv``.

A line of the file is a class with quantiles of measured over predicted. ``python -m benchmarks --only
published`` writes it, from published runs (GPUs) and this project's own (CPUs). It moves no prediction.
On GPUs mixtures of experts and models with adapters are classes of their own, as they err otherwise. Of other
models classes are generations of devices: intervals of finer ones (eager or compiled, divided or not) contain
fewer runs of sources that the fit left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from atorch_ns.cluster import Device, Hardware
from atorch_ns.profile import Profile
from atorch_ns.system import table_rows

Quantity = Literal["step time", "memory", "gain"]
Range = tuple[float, float]

FILE: Final = Path(__file__).with_name("residuals.csv")
QUANTILES: Final = (0.1, 0.9)
"""Quantiles of measured over predicted. Eight of ten runs of a class lie between them."""
OTHER: Final = "other"
"""Class of what has too few runs. It has the widest intervals of all."""
MIXTURE: Final = "mixture"
ADAPTERS: Final = "adapters"
_ADAPTER_SHARE: Final = 0.2
"""Share of trained parameters below which a model counts as one with adapters. Those of peft are a few percent."""
# Classes by the device whose kernels a device has.
_GENERATIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("A100", "A100-PCIe"), "Ampere"),
    **dict.fromkeys(("H100", "H200"), "Hopper"),
}
_EXACT: Final = (1.0, 1.0)


class Residual(NamedTuple):
    """Deviation of the runs of a class from their predictions.

    Attributes:
        low, high: the quantiles of measured over predicted.
        num_runs: number of runs, or of pairs of runs.
        sources: where they were published or measured.
    """

    low: float
    high: float
    num_runs: int
    sources: str

    @property
    def range(self) -> Range:
        """Quantiles, widened to include 1 so that a prediction lies in its own interval."""
        return min(self.low, 1.0), max(self.high, 1.0)


Residuals = Mapping[tuple[str, str], Residual]
"""Residuals by quantity and class."""


class Intervals(NamedTuple):
    """Factors on predictions between which eight of ten runs of a class lie.

    Attributes:
        time, memory: the least and the largest factor, around 1.
        gain: factor above which a gain over another plan on one cluster is believed: most errors are common.
        num_pairs: number of pairs of runs that ``gain`` is based on.
    """

    time: Range = _EXACT
    memory: Range = _EXACT
    gain: float = 1.0
    num_pairs: int = 0


UNKNOWN: Final = Intervals()
"""Intervals of predictions with unknown error: the figures alone."""


def class_of(device: Device, profile: Profile) -> str:
    """``"CPU"``, ``"mixture"``, ``"adapters"``, ``"Ampere"``, ``"Hopper"``, or ``"other"``."""
    if device.type == "cpu":
        return "CPU"
    if profile.trace is not None and profile.trace.num_experts:
        return MIXTURE
    if profile.num_trainable < _ADAPTER_SHARE * profile.num_parameters:
        return ADAPTERS
    return _GENERATIONS.get(device.kernels, OTHER)


def intervals_of(hardware: Hardware, profile: Profile) -> Intervals:
    """The intervals of plans on this hardware. On an unmeasured CPU, times are as unsure as on any device."""
    kind, table = class_of(hardware.device, profile), residuals()
    gain, memory = residual(table, "gain", kind), residual(table, "memory", kind)
    is_unsure = kind == "CPU" and not hardware.measured
    times = [residual(table, "step time", each).range for each in ((kind, OTHER) if is_unsure else (kind,))]
    time = (min(low for low, _ in times), max(high for _, high in times))
    return Intervals(time, memory.range, gain.high, gain.num_runs)


def residual(table: Residuals, quantity: Quantity, kind: str) -> Residual:
    """Returns the residual of a class, or else that of the other devices."""
    return table.get((quantity, kind)) or table[quantity, OTHER]


@functools.cache
def residuals() -> Residuals:
    """Reads the residuals of the file, by quantity and class."""
    return {
        (row["quantity"], row["device"]): Residual(
            float(row["low"]), float(row["high"]), int(row["runs"]), row["sources"]
        )
        for row in table_rows(FILE)
    }
