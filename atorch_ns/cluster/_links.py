"""The links between devices that users can name, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from atorch_ns.cluster._figure import Figure
from atorch_ns.cluster._hardware import Link, Rate

__all__ = ["LINKS", "LinkSheet"]

_NCCL_BANDWIDTH: Final = (
    "NCCL src/graph/topo.h: bandwidth of one NVLink in rings, times the links of a device"
)
_NCCL_LATENCY: Final = "NCCL src/graph/tuning.cc: hardware latency of one step of a ring, Simple protocol"
_PCIE: Final = (
    "PCI-SIG PCI Express base specification, x16, one direction; less a fifth for packets and copies"
)
_IB: Final = "InfiniBand Trade Association roadmap, 4x link, one adapter per device; 0.92 of the line rate"
_ETH: Final = "IEEE 802.3 line rate, one adapter per node; 0.9 of it over TCP"
_TCP: Final = "assumed: round trip of TCP through the kernel on one switch"
_EFA: Final = "AWS EC2 accelerated computing instances, network bandwidth; 0.8 of it"
_GLOO: Final = "assumed: gloo over the loopback device, one core per rank; measure with calibrate()"


class LinkSheet(NamedTuple):
    """A kind of link.

    Attributes:
        level: where it can be: ``"within"`` a node, ``"between"`` nodes, or ``"both"``.
        latency_s: of one message of a ring.
        bytes_per_s: one direction, of one device; of a whole node where :attr:`shared`.
        shared: whether the ranks of a node share it.
        overlap: share of a collective's time that computation can hide.
        aliases: other names.
    """

    level: str
    latency_s: Figure
    bytes_per_s: Figure
    shared: bool = False
    overlap: float = 1.0
    aliases: tuple[str, ...] = ()

    def link(self, name: str, num_sharing: int = 1) -> Link:
        """The link as ``num_sharing`` ranks of one node have it."""
        divided = num_sharing if self.shared else 1
        return Link(
            name=name,
            rate=Rate(self.latency_s.value, self.bytes_per_s.value / divided),
            overlap=self.overlap,
            source="; ".join(dict.fromkeys((self.bytes_per_s.source, self.latency_s.source))),
        )


def _nvlink(num_links: int, gb_per_s: float) -> LinkSheet:
    return LinkSheet(
        "within", Figure(3.4e-6, _NCCL_LATENCY), Figure(num_links * gb_per_s * 1e9, _NCCL_BANDWIDTH)
    )


def _pcie(gb_per_s: float) -> LinkSheet:
    return LinkSheet("within", Figure(5.7e-6, _NCCL_LATENCY), Figure(0.8 * gb_per_s * 1e9, _PCIE))


def _infiniband(gbit_per_s: float, *aliases: str) -> LinkSheet:
    rate = Figure(0.92 * gbit_per_s / 8 * 1e9, _IB)
    return LinkSheet("between", Figure(14e-6, _NCCL_LATENCY), rate, aliases=aliases)


def _ethernet(gbit_per_s: float) -> LinkSheet:
    return LinkSheet(
        "between", Figure(40e-6, _TCP), Figure(0.9 * gbit_per_s / 8 * 1e9, _ETH), shared=True, overlap=0.8
    )


def _efa(gbit_per_s: float, *aliases: str) -> LinkSheet:
    rate = Figure(0.8 * gbit_per_s / 8 * 1e9, _EFA)
    return LinkSheet("between", Figure(25e-6, _EFA), rate, shared=True, aliases=aliases)


LINKS: Final[Mapping[str, LinkSheet]] = MappingProxyType(
    {
        "nvlink2": _nvlink(6, 20.0),
        "nvlink3": _nvlink(12, 20.0),
        "nvlink4": _nvlink(18, 20.6),
        "nvlink5": _nvlink(18, 40.1),
        "xgmi2": LinkSheet(
            "within",
            Figure(5.7e-6, "assumed: as a step over PCI Express"),
            Figure(0.7 * 200e9, "AMD Instinct MI250X data sheet: Infinity Fabric of a die, 0.7 of it"),
        ),
        "xgmi3": LinkSheet(
            "within",
            Figure(5.7e-6, "assumed: as a step over PCI Express"),
            Figure(
                0.7 * 448e9, "AMD Instinct MI300X data sheet: 7 Infinity Fabric links of 64 GB/s, 0.7 of it"
            ),
        ),
        "pcie3": _pcie(15.75),
        "pcie4": _pcie(31.5),
        "pcie5": _pcie(63.0),
        "pcie6": _pcie(126.0),
        "ib100": _infiniband(100, "edr"),
        "ib200": _infiniband(200, "hdr"),
        "ib400": _infiniband(400, "ndr"),
        "ib800": _infiniband(800, "xdr"),
        "eth10": _ethernet(10),
        "eth25": _ethernet(25),
        "eth100": _ethernet(100),
        "eth200": _ethernet(200),
        "eth400": _ethernet(400),
        "efa400": _efa(400, "efa-p4d"),
        "efa3200": _efa(3200, "efa", "efa-p5"),
        "gloo": LinkSheet(
            "both",
            Figure(100e-6, _GLOO),
            Figure(1.5e9, _GLOO),
            overlap=0.0,
            aliases=("gloo-loopback",),
        ),
    }
)
"""Links by name."""
