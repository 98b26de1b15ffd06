"""The links between devices that users can name, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from atorch_ns.cluster.kernels import FOLDER, AttentionKind, Figure, attention_share, usual_attention
from atorch_ns.system import table_rows


@dataclass(frozen=True)
class Rate:
    """The cost of a collective on a link: ``latency_s + bytes / bytes_per_s`` for each message of a ring.

    Attributes:
        latency_s: α, seconds to start one message.
        bytes_per_s: 1/β, bytes a rank sends each second.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """How ranks talk on one level: inside a node, or between nodes.

    Attributes:
        name: name, such as ``"nvlink4"``, ``"ib400"``, ``"gloo"``.
        rate: rate of collectives without their own. Where the ranks of a node share an adapter, one rank's
            share of it.
        collectives: rates by collective (``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
            ``"all_to_all"``, ``"broadcast"``, ``"send"``) where they are known to differ.
        overlap: share of a collective's time that computation can hide. On a CPU both need the same cores.
        ramp: bytes that each of a ring's messages has, and the share of the rate that they then reach, in the order of the
            bytes; empty where ``latency_s`` tells what small messages cost.
        source: where the figures come from, or "measured on …".
    """

    name: str
    rate: Rate
    collectives: Mapping[str, Rate] = field(default_factory=dict)
    overlap: float = 1.0
    ramp: tuple[tuple[float, float], ...] = ()
    source: str = ""

    def message_seconds(self, collective: str, num_bytes: np.ndarray | float) -> np.ndarray:
        """Seconds of one message of a ring."""
        rate = self.rate_of(collective)
        if not self.ramp:
            return np.asarray(rate.latency_s + num_bytes / rate.bytes_per_s)
        sizes, shares = zip(*self.ramp, strict=True)
        # Below the smallest size that was measured a message takes as long as that one.
        num_bytes = np.maximum(num_bytes, sizes[0])
        return np.asarray(num_bytes / rate.bytes_per_s / np.interp(np.log(num_bytes), np.log(sizes), shares))

    def rate_of(self, collective: str) -> Rate:
        """The rate of a collective, its own where it has one."""
        return self.collectives.get(collective, self.rate)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator, or the share of a CPU that one rank has.

    Attributes:
        name: as the table and users write it: ``"H100-80GB"``.
        type: ``"cuda"`` or ``"cpu"``.
        memory_bytes: memory of one device.
        memory_bytes_per_s: bytes that element-wise operators read and write, their new results included.
        in_place_bytes_per_s: the same for operators that write into tensors that are there already; 0 for no
            difference. On a CPU fresh memory is several times slower: the system maps its pages one by one.
        flops_per_s: dense peak by dtype: ``"float32"``, ``"tfloat32"``, ``"bfloat16"``, ``"float16"``,
            ``"float8"``.
        launch_s: seconds that the host needs for one operator, with the module, the autograd node and the
            views around it.
        efficiency: share of the peak that the best matrix products reach.
        efficiencies: the same by dtype, where it differs.
        kernels: the device whose rates of fused attention it has (``kernels.csv``); empty for those of products.
        attention: the library of fused attention (:data:`~atorch_ns.cluster.kernels.ATTENTION_LIBRARIES`); empty for
            the one that torch takes on this device.
        attention_factors: rates of fused attention as they were measured, of those of the table, by pass and
            dtype (``"backward/bfloat16"``), or by pass alone, as 0.2.0 wrote them; 1 of those that are not there.
        capability: CUDA compute capability.
        price_per_hour: US dollars, for the objective of cost; 0 where unknown.
        source: where the figures come from, or "measured on …".
    """

    name: str
    type: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float
    efficiency: float = 1.0
    efficiencies: Mapping[str, float] = field(default_factory=dict)
    kernels: str = ""
    attention: str = ""
    attention_factors: Mapping[str, float] = field(default_factory=dict)
    capability: tuple[int, int] | None = None
    price_per_hour: float = 0.0
    in_place_bytes_per_s: float = 0.0
    source: str = ""

    @property
    def update_bytes_per_s(self) -> float:
        """Bytes that operators in place read and write."""
        return self.in_place_bytes_per_s or self.memory_bytes_per_s

    def flops_of(self, dtype: str) -> float:
        """Peak for a dtype, that of float32 where the device has no figure for it."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])

    def products_of(self, dtype: str) -> float:
        """FLOP/s of the best matrix products in a dtype."""
        return self.flops_of(dtype) * self.efficiencies.get(dtype, self.efficiency)

    def attention_of(self, dtype: str, kind: AttentionKind) -> float:
        """FLOP/s of fused attention: the share of the rate of products that it has by the table, where it is there."""
        library = self.attention or usual_attention(self.kernels)
        of_all = self.attention_factors.get(kind.passes, 1.0)
        factor = self.attention_factors.get(f"{kind.passes}/{dtype}", of_all)
        return factor * self.products_of(dtype) * attention_share(self.kernels, library, kind)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster's devices and links.

    Attributes:
        device: every rank's device.
        within_node: the link between ranks of a node.
        between_nodes: the link between nodes.
        to_host: the link between a device and its host's memory.
        measured: whether a measurement on these ranks has refined the figures.
    """

    device: Device
    within_node: Link
    between_nodes: Link
    to_host: Link
    measured: bool = False


_NCCL_BANDWIDTH: Final = (
    "NCCL src/graph/topo.h: bandwidth of one NVLink in rings, times the links of a device"
)
_NCCL_LATENCY: Final = "NCCL src/graph/tuning.cc: hardware latency of one step of a ring, Simple protocol"
_NCCL_OVERLAP: Final = 0.78
"""Share of a collective's time that computation hides: NCCL's 24 blocks keep 24 of an H100's 132 multiprocessors from
products meanwhile, which take 24/108 longer (NVIDIA developer forum, topic 337991, measures that and more)."""
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
        latency_s: latency of one message of a ring.
        bytes_per_s: one direction, of one device; of a whole node where :attr:`shared`.
        shared: whether the ranks of a node share it.
        overlap: share of a collective's time that computation can hide.
        aliases: other names.
        ramp: as in :class:`Link`.
    """

    level: str
    latency_s: Figure
    bytes_per_s: Figure
    shared: bool = False
    overlap: float = _NCCL_OVERLAP
    aliases: tuple[str, ...] = ()
    ramp: tuple[tuple[float, float], ...] = ()

    def link(self, name: str, num_sharing: int = 1) -> Link:
        """The link as ``num_sharing`` ranks of one node have it."""
        divided = num_sharing if self.shared else 1
        return Link(
            name=name,
            rate=Rate(self.latency_s.value, self.bytes_per_s.value / divided),
            overlap=self.overlap,
            ramp=self.ramp,
            source="; ".join(dict.fromkeys((self.bytes_per_s.source, self.latency_s.source))),
        )


def _nvlink(num_links: int, gb_per_s: float, name: str = "") -> LinkSheet:
    """NVLink: as its rings were measured at every size, where they are in ``links.csv``."""
    latency, peak = Figure(3.4e-6, _NCCL_LATENCY), Figure(num_links * gb_per_s * 1e9, _NCCL_BANDWIDTH)
    rows = [row for row in table_rows(FOLDER / "links.csv") if row["link"] == name]
    if not rows:
        return LinkSheet("within", latency, peak)
    best = max(float(row["gb_per_s"]) for row in rows)
    # Eight ranks; each message is an eighth of the tensor.
    ramp = tuple((float(row["mib"]) * 2**20 / 8, float(row["gb_per_s"]) / best) for row in rows)
    return LinkSheet("within", latency, Figure(best * 1e9, rows[0]["source"]), ramp=ramp)


def _xgmi(gb_per_s: float, source: str) -> LinkSheet:
    latency = Figure(5.7e-6, "assumed: as a step over PCI Express")
    return LinkSheet("within", latency, Figure(0.7 * (gb_per_s * 1e9), f"{source}, 0.7 of it"))


def _pcie(gb_per_s: float) -> LinkSheet:
    return LinkSheet("within", Figure(5.7e-6, _NCCL_LATENCY), Figure(0.8 * gb_per_s * 1e9, _PCIE))


def _infiniband(gbit_per_s: float, *aliases: str) -> LinkSheet:
    rate = Figure(0.92 * gbit_per_s / 8 * 1e9, _IB)
    return LinkSheet("between", Figure(14e-6, _NCCL_LATENCY), rate, aliases=aliases)


def _ethernet(gbit_per_s: float) -> LinkSheet:
    return LinkSheet("between", Figure(40e-6, _TCP), Figure(0.9 * gbit_per_s / 8 * 1e9, _ETH), shared=True)


def _efa(gbit_per_s: float, *aliases: str) -> LinkSheet:
    rate = Figure(0.8 * gbit_per_s / 8 * 1e9, _EFA)
    return LinkSheet("between", Figure(25e-6, _EFA), rate, shared=True, aliases=aliases)


_GLOO_LINK: Final = LinkSheet(
    "both", Figure(100e-6, _GLOO), Figure(1.5e9, _GLOO), overlap=0.0, aliases=("gloo-loopback",)
)

LINKS: Final[Mapping[str, LinkSheet]] = MappingProxyType(
    {
        "nvlink2": _nvlink(6, 20.0),
        "nvlink3": _nvlink(12, 20.0, "nvlink3"),
        "nvlink4": _nvlink(18, 20.6, "nvlink4"),
        "nvlink5": _nvlink(18, 40.1, "nvlink5"),
        "xgmi2": _xgmi(200, "AMD Instinct MI250X data sheet: Infinity Fabric of a die"),
        "xgmi3": _xgmi(448, "AMD Instinct MI300X data sheet: 7 Infinity Fabric links of 64 GB/s"),
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
        "gloo": _GLOO_LINK,
    }
)
"""Links by name."""
