"""The devices that users can name, each figure with its source.

FLOP/s are dense: where a data sheet gives figures with sparsity, half of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from atorch_ns.cluster.hardware import Device
from atorch_ns.cluster.kernels import Figure, product_share

_LAUNCH: Final = Figure(6e-6, "assumed: host time of one eager operator with autograd")
_EFFICIENCY: Final = Figure(0.77, "assumed: between the best bf16 products of A100 and those of GB200")
_STREAMED: Final = (0.92, "0.92 of it, as triads and copies of 1 GiB reach on H100 (3.08 and 3.02 TB/s)")
# A device's memory is what torch reports as its total capacity: the data sheet's size in GiB less what the
# driver keeps, and for GDDR with error correction less a sixteenth.
_HBM: Final = (0.988, "torch reports 79.1 of 80 GiB on H100, 93.0 of 94 on H100 NVL")
_GDDR_ECC: Final = (
    0.923,
    "torch reports 22.2 of 24 GiB on L4, 44.4 of 48 on L40S: error correction lies in it",
)
_GDDR: Final = (0.985, "torch reports 23.7 of 24 GiB on RTX 3090")


@dataclass(frozen=True, kw_only=True)
class DeviceSheet:
    """What is known of a kind of device.

    Attributes:
        memory_bytes, memory_bytes_per_s: as torch reports it; as operators reach it.
        flops_per_s: dense peak by dtype.
        launch_s, efficiency, efficiencies, kernels: see :class:`Device`.
        power_w: the most that the board takes.
        capability: CUDA's (or the first two digits of an AMD architecture).
        within_node: the link to others of the same node, by name.
        to_host: the link to the host's memory, by name.
        aliases: other names that users may write.
        reported: what the driver's name for the device holds, all of it.
    """

    memory_bytes: Figure
    memory_bytes_per_s: Figure
    flops_per_s: Mapping[str, Figure]
    capability: tuple[int, int]
    within_node: str
    to_host: str
    aliases: tuple[str, ...] = ()
    reported: tuple[tuple[str, ...], ...] = ()
    launch_s: Figure = _LAUNCH
    efficiency: Figure = _EFFICIENCY
    efficiencies: Mapping[str, Figure] = field(default_factory=dict)
    kernels: str = ""
    power_w: Figure | None = None

    def figures(self) -> dict[str, Figure]:
        """Every figure by its name."""
        named = {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "launch_s": self.launch_s,
            "efficiency": self.efficiency,
        }
        by_dtype = {"flops_per_s": self.flops_per_s, "efficiency": self.efficiencies}
        for name, figures in by_dtype.items():
            named |= {f"{name}.{dtype}": figure for dtype, figure in figures.items()}
        return named

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


def _sheet(
    title: str,
    *,
    gib: float,
    kind: tuple[float, str],
    gb_per_s: float,
    tflops: Mapping[str, float],
    capability: tuple[int, int],
    links: tuple[str, str],
    kernels: str = "",
    watts: float = 0.0,
    names: tuple[str, ...] = (),
    reported: tuple[tuple[str, ...], ...] = (),
) -> DeviceSheet:
    """A sheet; ``kernels`` names the device of ``kernels.csv`` whose products have the same share of the peak."""
    share, why = kind
    streamed, how = _STREAMED
    found = {dtype: product_share(kernels, dtype) for dtype in tflops}
    efficiencies = {dtype: figure for dtype, figure in found.items() if figure is not None}
    return DeviceSheet(
        efficiency=efficiencies.pop("bfloat16", _EFFICIENCY),
        efficiencies=MappingProxyType(efficiencies),
        kernels=kernels,
        power_w=Figure(watts, title) if watts else None,
        memory_bytes=Figure(gib * share * 2**30, f"{title}; {why}"),
        memory_bytes_per_s=Figure(gb_per_s * streamed * 1e9, f"{title}; {how}"),
        flops_per_s=MappingProxyType({key: Figure(value * 1e12, title) for key, value in tflops.items()}),
        capability=capability,
        within_node=links[0],
        to_host=links[1],
        aliases=names,
        reported=reported,
    )


def _tensor(float32: float, tfloat32: float, sixteen: float, float8: float | None = None) -> dict[str, float]:
    """TFLOP/s of a device whose tensor cores know all dtypes; both 16-bit ones are equally fast."""
    rates = {"float32": float32, "tfloat32": tfloat32, "bfloat16": sixteen, "float16": sixteen}
    return rates if float8 is None else {**rates, "float8": float8}


_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_NVLINK3, _NVLINK4, _NVLINK5 = ("nvlink3", "pcie4"), ("nvlink4", "pcie5"), ("nvlink5", "pcie5")
_A100_FLOPS, _H100_FLOPS = _tensor(19.5, 156, 312), _tensor(67, 494.5, 989.5, 1979)

DEVICES: Final[Mapping[str, DeviceSheet]] = MappingProxyType(
    {
        "V100-16GB": _sheet(
            _V100, gib=16, kind=_HBM, gb_per_s=900, tflops={"float32": 15.7, "float16": 125},
            capability=(7, 0), links=("nvlink2", "pcie3"), names=("V100",),
            reported=(("V100", "16GB"),),
        ),
        "V100-32GB": _sheet(
            _V100, gib=32, kind=_HBM, gb_per_s=900, tflops={"float32": 15.7, "float16": 125},
            capability=(7, 0), links=("nvlink2", "pcie3"), reported=(("V100", "32GB"),),
        ),
        "T4": _sheet(
            "NVIDIA T4 Tensor Core GPU data sheet", gib=16, kind=_GDDR_ECC, gb_per_s=320,
            tflops={"float32": 8.1, "float16": 65}, capability=(7, 5), links=("pcie3", "pcie3"),
            reported=(("Tesla T4",),),
        ),
        "A100-40GB": _sheet(
            _A100, gib=40, kind=_HBM, gb_per_s=1555, tflops=_A100_FLOPS, kernels="A100", watts=400, capability=(8, 0), links=_NVLINK3,
            names=("A100", "A100-SXM4-40GB"), reported=(("A100", "SXM", "40GB"),),
        ),
        "A100-80GB": _sheet(
            _A100, gib=80, kind=_HBM, gb_per_s=2039, tflops=_A100_FLOPS, kernels="A100", watts=400, capability=(8, 0), links=_NVLINK3,
            names=("A100-SXM4-80GB",), reported=(("A100", "SXM", "80GB"),),
        ),
        "A100-PCIe-40GB": _sheet(
            _A100, gib=40, kind=_HBM, gb_per_s=1555, tflops=_A100_FLOPS, kernels="A100-PCIe", watts=250, capability=(8, 0),
            links=("pcie4", "pcie4"), reported=(("A100", "PCIE", "40GB"),),
        ),
        "A100-PCIe-80GB": _sheet(
            _A100, gib=80, kind=_HBM, gb_per_s=1935, tflops=_A100_FLOPS, kernels="A100-PCIe", watts=300, capability=(8, 0),
            links=("pcie4", "pcie4"), names=("A100-PCIe",), reported=(("A100", "80GB", "PCIE"),),
        ),
        "A10": _sheet(
            "NVIDIA A10 Tensor Core GPU data sheet", gib=24, kind=_GDDR_ECC, gb_per_s=600,
            tflops=_tensor(31.2, 62.5, 125), capability=(8, 6), links=("pcie4", "pcie4"),
            reported=(("NVIDIA A10",),),
        ),
        "A10G": _sheet(
            "NVIDIA A10G data sheet (AWS EC2 G5)", gib=24, kind=_GDDR_ECC, gb_per_s=600,
            tflops=_tensor(35, 35, 70), capability=(8, 6), links=("pcie4", "pcie4"), reported=(("A10G",),),
        ),
        "A6000": _sheet(
            "NVIDIA RTX A6000 data sheet", gib=48, kind=_GDDR, gb_per_s=768, tflops=_tensor(38.7, 77.4, 154.8),
            capability=(8, 6), links=("pcie4", "pcie4"), names=("RTX-A6000",), reported=(("RTX A6000",),),
        ),
        "RTX-3090": _sheet(
            "NVIDIA Ampere GA102 GPU architecture white paper", gib=24, kind=_GDDR, gb_per_s=936,
            tflops=_tensor(35.6, 35.6, 71), capability=(8, 6), links=("pcie4", "pcie4"), names=("3090",),
            reported=(("RTX 3090",),),
        ),
        "RTX-4090": _sheet(
            "NVIDIA Ada GPU architecture white paper", gib=24, kind=_GDDR, gb_per_s=1008,
            tflops=_tensor(82.6, 82.6, 165.2, 330.3), capability=(8, 9), links=("pcie4", "pcie4"),
            names=("4090",), reported=(("RTX 4090",),),
        ),
        "L4": _sheet(
            "NVIDIA L4 Tensor Core GPU data sheet", gib=24, kind=_GDDR_ECC, gb_per_s=300,
            tflops=_tensor(30.3, 60, 121, 242.5), capability=(8, 9), links=("pcie4", "pcie4"),
            reported=(("NVIDIA L4",),),
        ),
        "L40S": _sheet(
            "NVIDIA L40S GPU data sheet", gib=48, kind=_GDDR_ECC, gb_per_s=864,
            tflops=_tensor(91.6, 183, 362, 733), capability=(8, 9), links=("pcie4", "pcie4"),
            reported=(("L40S",),),
        ),
        "H100-80GB": _sheet(
            _H100, gib=80, kind=_HBM, gb_per_s=3350, tflops=_H100_FLOPS, kernels="H100", watts=700, capability=(9, 0), links=_NVLINK4,
            names=("H100", "H100-SXM", "H100-SXM5-80GB"), reported=(("H100", "HBM3"), ("H100", "SXM")),
        ),
        "H100-96GB": _sheet(
            "NVIDIA H100 PCIe GPU product brief, six stacks of HBM2e for its five; else as H100", gib=96, kind=_HBM,
            gb_per_s=2447, tflops=_H100_FLOPS, kernels="H100", watts=700, capability=(9, 0), links=_NVLINK4,
            names=("H100-96GB-HBM2e",),
        ),
        "H100-PCIe": _sheet(
            "NVIDIA H100 PCIe GPU product brief", gib=80, kind=_HBM, gb_per_s=2039,
            tflops=_tensor(51.2, 378, 756, 1513), kernels="H100", watts=350, capability=(9, 0), links=("pcie5", "pcie5"),
            names=("H100-PCIe-80GB",), reported=(("H100", "PCIE"),),
        ),
        "H100-NVL": _sheet(
            _H100, gib=94, kind=_HBM, gb_per_s=3938, tflops=_tensor(60, 417.5, 835.5, 1670.5),
            kernels="H100", watts=400, capability=(9, 0), links=_NVLINK4, names=("H100-NVL-94GB",), reported=(("H100", "NVL"),),
        ),
        "H200-141GB": _sheet(
            _H200, gib=141, kind=_HBM, gb_per_s=4800, tflops=_H100_FLOPS, kernels="H200", watts=700, capability=(9, 0), links=_NVLINK4,
            names=("H200",), reported=(("H200",),),
        ),
        "B200": _sheet(
            "NVIDIA HGX B200 data sheet, an eighth of its figures", gib=180, kind=_HBM, gb_per_s=8000,
            tflops=_tensor(75, 1125, 2250, 4500), kernels="B200", watts=1000, capability=(10, 0), links=_NVLINK5, names=("B200-180GB",),
            reported=(("B200",),),
        ),
        "GB200": _sheet(
            "NVIDIA GB200 NVL72 data sheet, half of a superchip", gib=186, kind=_HBM, gb_per_s=8000,
            tflops=_tensor(80, 1250, 2500, 5000), kernels="GB200", watts=1200, capability=(10, 0), links=("nvlink5", "pcie6"),
            names=("GB200-186GB",), reported=(("GB200",),),
        ),
        "MI250X": _sheet(
            "AMD Instinct MI250X data sheet, one of its two dies", gib=64, kind=_HBM, gb_per_s=1638,
            tflops={"float32": 47.9, "bfloat16": 191.5, "float16": 191.5}, capability=(9, 0),
            links=("xgmi2", "pcie4"), reported=(("MI250X",),),
        ),
        "MI300X": _sheet(
            "AMD Instinct MI300X data sheet", gib=192, kind=_HBM, gb_per_s=5300,
            tflops=_tensor(163.4, 653.7, 1307.4, 2614.9), kernels="MI300X", watts=750, capability=(9, 4), links=("xgmi3", "pcie5"),
            reported=(("MI300X",),),
        ),
    }
)  # fmt: skip
"""Devices by name."""


def device_named(reported: str) -> str | None:
    """The name in the table of a device that its driver calls ``reported``, if it is there.

    Example:
        >>> device_named("NVIDIA H100 80GB HBM3"), device_named("NVIDIA L4"), device_named("GeForce GT 710")
        ('H100-80GB', 'L4', None)
    """
    found = [
        (sum(map(len, parts)), name)
        for name, sheet in DEVICES.items()
        for parts in sheet.reported
        if all(_holds(reported, part) for part in parts)
    ]
    return max(found)[1] if found else None


def _holds(text: str, part: str) -> bool:
    """Whether ``part`` stands in ``text`` and is not merely a piece of another model's name (L4 of L40S)."""
    text, part = text.upper(), part.upper()
    at = text.find(part)
    before, after = text[max(0, at - 1) : at], text[at + len(part) : at + len(part) + 1]
    return at >= 0 and not before.isalnum() and not (part[-1].isdigit() and after.isalnum())
