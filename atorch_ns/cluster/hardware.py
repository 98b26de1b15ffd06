"""The links between devices that users can name, each figure with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np

from atorch_ns.cluster.kernels import FOLDER, AttentionKind, SourcedFigure, attention_share, usual_attention
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
    """The link between ranks on one level, inside a node or between nodes.

    Attributes:
        name: name, such as ``"nvlink4"``, ``"ib400"``, ``"gloo"``.
        rate: rate of collectives without their own. Where the ranks of a node share an adapter, one rank's
            share of it.
        collectives: rates by collective (``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
            ``"all_to_all"``, ``"broadcast"``, ``"send"``) where they are known to differ.
        overlap: share of a collective's time that computation can hide. On a CPU both need the same cores.
        ramp: bytes of each of a ring's messages, ascending, and the share of the rate that they reach; empty
            where ``latency_s`` tells what small messages cost.
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
        num_bytes = np.maximum(num_bytes, sizes[0])  # a smaller message takes as long as the smallest here
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
        memory_bytes_per_s: bytes that element-wise operators read and write, their new results included.
        in_place_bytes_per_s: the same for operators that write into existing tensors; 0 for no
            difference. On a CPU fresh memory is several times slower: the system maps its pages one by one.
        flops_per_s: dense peak by dtype: ``"float32"``, ``"tfloat32"``, ``"bfloat16"``, ``"float16"``,
            ``"float8"``.
        launch_s: seconds that the host needs for one operator, with the module, the autograd node and the
            views around it.
        efficiency: share of the peak that the best matrix products reach.
        efficiencies: the same by dtype, where it differs.
        kernels: the device in ``kernels.csv`` with its rates of fused attention; empty for rates of products.
        attention: the library of fused attention (:data:`~atorch_ns.cluster.kernels.ATTENTION_LIBRARIES`);
            empty for the one that torch takes on this device.
        attention_factors: measured rates of fused attention over those of the table, by pass and dtype
            (``"backward/bfloat16"``), or by pass alone, as 0.2.0 wrote them; 1 where absent.
        capability: CUDA compute capability.
        price_per_hour: US dollars, for the objective of cost; 0 where unknown.
        source: where the figures come from, or "measured on …".
    """

    name: str
    type: Literal["cuda", "cpu"]
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
        """Peak for a dtype, or the peak of float32 where the device has no figure for it."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])

    def products_of(self, dtype: str) -> float:
        """FLOP/s of the best matrix products in a dtype."""
        return self.flops_of(dtype) * self.efficiencies.get(dtype, self.efficiency)

    def attention_of(self, dtype: str, kind: AttentionKind) -> float:
        """FLOP/s of fused attention: the table's share of the rate of products, or all of it by default."""
        library = self.attention or usual_attention(self.kernels)
        of_all = self.attention_factors.get(kind.passes, 1.0)
        factor = self.attention_factors.get(f"{kind.passes}/{dtype}", of_all)
        return factor * self.products_of(dtype) * attention_share(self.kernels, library, kind)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster's devices and links.

    Attributes:
        device: every rank's device.
        within_node, between_nodes: the links between ranks of a node and between nodes.
        to_host: the link between a device and its host's memory.
        measured: whether a measurement on these ranks has refined the figures.
    """

    device: Device
    within_node: Link
    between_nodes: Link
    to_host: Link
    measured: bool = False


_NCCL_OVERLAP: Final = 0.78
"""Share of a collective that computation hides: NCCL's 24 blocks occupy 24 of an H100's 132 multiprocessors;
products then take 24/108 longer (NVIDIA developer forum, topic 337991, measures that and more)."""


class LinkSheet(NamedTuple):
    """A kind of link.

    Attributes:
        level: possible level: ``"within"`` a node, ``"between"`` nodes, or ``"both"``.
        latency_s: latency of one message of a ring.
        bytes_per_s: rate in one direction of one device, or of a whole node if :attr:`shared`.
        shared: whether the ranks of a node share it.
        aliases: other names.
        overlap, ramp: as in :class:`Link`.
    """

    level: str
    latency_s: SourcedFigure
    bytes_per_s: SourcedFigure
    shared: bool = False
    overlap: float = _NCCL_OVERLAP
    aliases: tuple[str, ...] = ()
    ramp: tuple[tuple[float, float], ...] = ()

    def link(self, name: str, num_sharing: int = 1) -> Link:
        """The link as ``num_sharing`` ranks of one node have it."""
        divisor = num_sharing if self.shared else 1
        return Link(
            name=name,
            rate=Rate(self.latency_s.value, self.bytes_per_s.value / divisor),
            overlap=self.overlap,
            ramp=self.ramp,
            source="; ".join(dict.fromkeys((self.bytes_per_s.source, self.latency_s.source))),
        )


def _read_link(row: Mapping[str, str], ring_rows: Iterable[Mapping[str, str]]) -> LinkSheet:
    peak = SourcedFigure(float(row["gb_per_s"]) * float(row["share"]) * 1e9, row["source"])
    rings = [ring for ring in ring_rows if ring["link"] == row["name"]]
    best = max((float(ring["gb_per_s"]) for ring in rings), default=0.0)  # replaces the sheet's peak
    return LinkSheet(
        row["level"],
        SourcedFigure(float(row["latency_us"]) / 1e6, row["latency_source"]),
        SourcedFigure(best * 1e9, rings[0]["source"]) if rings else peak,
        shared=bool(row["shared"]),
        overlap=float(row["overlap"] or _NCCL_OVERLAP),
        aliases=tuple(row["aliases"].split()),
        # Eight ranks; each message is an eighth of the tensor.
        ramp=tuple((float(ring["mib"]) * 2**20 / 8, float(ring["gb_per_s"]) / best) for ring in rings),
    )


def _read_links() -> Mapping[str, LinkSheet]:
    ring_rows = table_rows(FOLDER / "links.csv")
    return MappingProxyType(
        {row["name"]: _read_link(row, ring_rows) for row in table_rows(FOLDER / "link_sheets.csv")}
    )


LINKS: Final = _read_links()
"""Links by name."""
