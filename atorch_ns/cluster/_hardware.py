"""Hardware: how fast a cluster's devices compute and talk, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Device", "Hardware", "Link", "Rate"]


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
        name: as ``"nvlink4"``, ``"ib400"``, ``"gloo"``.
        rate: for collectives that have none of their own. Where the ranks of a node share an adapter, a
            rank's part of it.
        collectives: rates by collective (``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
            ``"all_to_all"``, ``"broadcast"``, ``"send"``) where they are known to differ.
        overlap: share of a collective's time that computation can hide. On a CPU both need the same cores.
        source: where the figures come from, or "measured".
    """

    name: str
    rate: Rate
    collectives: Mapping[str, Rate] = field(default_factory=dict)
    overlap: float = 1.0
    source: str = ""

    def rate_of(self, collective: str) -> Rate:
        """The rate of a collective, its own where it has one."""
        return self.collectives.get(collective, self.rate)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator, or the share of a CPU that one rank has.

    Attributes:
        name: as the table and users write it: ``"H100-80GB"``.
        type: ``"cuda"`` or ``"cpu"``.
        memory_bytes: of one device.
        memory_bytes_per_s: bytes that element-wise operators read and write, their new results included.
        in_place_bytes_per_s: the same for operators that write into tensors that are there already; 0 for no
            difference. On a CPU fresh memory is several times slower: the system maps its pages one by one.
        flops_per_s: dense peak by dtype: ``"float32"``, ``"tfloat32"``, ``"bfloat16"``, ``"float16"``,
            ``"float8"``.
        launch_s: seconds that the host needs for one operator, with the module, the autograd node and the
            views around it.
        efficiency: share of the peak that large matrix products reach in training.
        capability: CUDA compute capability.
        price_per_hour: US dollars, for the objective of cost; 0 where unknown.
        source: where the figures come from, or "measured".
    """

    name: str
    type: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float
    efficiency: float = 1.0
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
