"""The devices that users can name, each figure with its source, read from ``devices.csv``.

TFLOP/s are dense: where a data sheet gives figures with sparsity, half of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from atorch_ns.cluster.hardware import Device
from atorch_ns.cluster.kernels import FOLDER, SourcedFigure, product_share
from atorch_ns.system import table_rows

_LAUNCH: Final = SourcedFigure(6e-6, "assumed: host time of one eager operator with autograd")
_EFFICIENCY: Final = SourcedFigure(0.77, "assumed: between the best bf16 products of A100 and those of GB200")
_STREAMED: Final = (0.92, "0.92 of it, as triads and copies of 1 GiB reach on H100 (3.08 and 3.02 TB/s)")
# A device's memory is what torch reports as its total capacity: the data sheet's size in GiB less what the
# driver keeps, and for GDDR with error correction less a sixteenth.
_MEMORY: Final = {
    "HBM": (0.988, "torch reports 79.1 of 80 GiB on H100, 93.0 of 94 on H100 NVL"),
    "GDDR with ECC": (
        0.923,
        "torch reports 22.2 of 24 GiB on L4, 44.4 of 48 on L40S: error correction lies in it",
    ),
    "GDDR": (0.985, "torch reports 23.7 of 24 GiB on RTX 3090"),
}
_DTYPES: Final = ("float32", "tfloat32", "bfloat16", "float16", "float8")


@dataclass(frozen=True, kw_only=True)
class DeviceSheet:
    """Known figures of a kind of device.

    Attributes:
        memory_bytes, memory_bytes_per_s: as torch reports it; as operators reach it.
        flops_per_s: dense peak by dtype.
        launch_s, efficiency, efficiencies, kernels: see :class:`Device`.
        power_w: the maximum power of the board.
        capability: CUDA's (or the first two digits of an AMD architecture).
        within_node: the link to others of the same node, by name.
        to_host: the link to the host's memory, by name.
        most_per_node: devices that the link within a node joins; 0 for any number.
        aliases: other names that users may write.
        reported: words that the driver's name for the device must all contain.
    """

    memory_bytes: SourcedFigure
    memory_bytes_per_s: SourcedFigure
    flops_per_s: Mapping[str, SourcedFigure]
    capability: tuple[int, int]
    within_node: str
    to_host: str
    most_per_node: int = 0
    aliases: tuple[str, ...] = ()
    reported: tuple[tuple[str, ...], ...] = ()
    launch_s: SourcedFigure = _LAUNCH
    efficiency: SourcedFigure = _EFFICIENCY
    efficiencies: Mapping[str, SourcedFigure] = field(default_factory=dict)
    kernels: str = ""
    power_w: SourcedFigure | None = None

    def figures(self) -> dict[str, SourcedFigure]:
        """Every figure by its name."""
        result = {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "launch_s": self.launch_s,
            "efficiency": self.efficiency,
        }
        by_dtype = {"flops_per_s": self.flops_per_s, "efficiency": self.efficiencies}
        for name, figures in by_dtype.items():
            result |= {f"{name}.{dtype}": figure for dtype, figure in figures.items()}
        return result

    def device(self, name: str) -> Device:
        """The device of that name."""
        return Device(
            name=name,
            type="cuda",
            memory_bytes=int(self.memory_bytes.value),
            memory_bytes_per_s=self.memory_bytes_per_s.value,
            flops_per_s={dtype: figure.value for dtype, figure in self.flops_per_s.items()},
            launch_s=self.launch_s.value,
            efficiency=self.efficiency.value,
            efficiencies={dtype: figure.value for dtype, figure in self.efficiencies.items()},
            kernels=self.kernels,
            capability=self.capability,
            source="; ".join(dict.fromkeys(figure.source for figure in self.figures().values())),
        )


def _read_sheet(row: Mapping[str, str]) -> DeviceSheet:
    title, (share, why), (stream_share, how) = row["sheet"], _MEMORY[row["memory"]], _STREAMED
    tflops = {dtype: float(row[dtype]) for dtype in _DTYPES if row[dtype]}
    # ``kernels`` names the device of kernels.csv whose products reach the same share of the peak.
    shares = {dtype: product_share(row["kernels"], dtype) for dtype in tflops}
    efficiencies = {dtype: figure for dtype, figure in shares.items() if figure is not None}
    major, minor = row["capability"].split(".")
    return DeviceSheet(
        efficiency=efficiencies.pop("bfloat16", _EFFICIENCY),  # before efficiencies is read
        efficiencies=MappingProxyType(efficiencies),
        kernels=row["kernels"],
        power_w=SourcedFigure(float(row["watts"]), title) if row["watts"] else None,
        memory_bytes=SourcedFigure(float(row["gib"]) * share * 2**30, f"{title}; {why}"),
        memory_bytes_per_s=SourcedFigure(float(row["gb_per_s"]) * stream_share * 1e9, f"{title}; {how}"),
        flops_per_s=MappingProxyType(
            {key: SourcedFigure(value * 1e12, title) for key, value in tflops.items()}
        ),
        capability=(int(major), int(minor)),
        within_node=row["within_node"],
        to_host=row["to_host"],
        most_per_node=int(row["most_per_node"] or 0),
        aliases=tuple(filter(None, row["aliases"].split("; "))),
        reported=tuple(tuple(name.split(" & ")) for name in filter(None, row["reported"].split("; "))),
    )


DEVICES: Final[Mapping[str, DeviceSheet]] = MappingProxyType(
    {row["name"]: _read_sheet(row) for row in table_rows(FOLDER / "devices.csv")}
)
"""Devices by name."""


def device_named(driver_name: str) -> str | None:
    """The table's name of the device that the driver calls ``driver_name``; ``None`` if it is missing.

    Example:
        >>> device_named("NVIDIA H100 80GB HBM3"), device_named("NVIDIA L4"), device_named("GeForce GT 710")
        ('H100-80GB', 'L4', None)
    """
    matches = [
        (sum(map(len, parts)), name)
        for name, sheet in DEVICES.items()
        for parts in sheet.reported
        if all(_contains_name(driver_name, part) for part in parts)
    ]
    return max(matches)[1] if matches else None  # the most specific name


def _contains_name(text: str, part: str) -> bool:
    text, part = text.upper(), part.upper()
    at = text.find(part)
    before, after = text[max(0, at - 1) : at], text[at + len(part) : at + len(part) + 1]
    # Must not be part of another model's name, as L4 is part of L40S.
    return at >= 0 and not before.isalnum() and not (part[-1].isdigit() and after.isalnum())
