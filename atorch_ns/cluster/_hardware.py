"""Hardware: how fast a cluster's devices compute and talk, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

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
        rate: for collectives that have none of their own.
        collectives: rates by collective (``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
            ``"all_to_all"``, ``"broadcast"``, ``"send"``) where they are known to differ.
        source: where the figures come from, or "measured".
    """

    name: str
    rate: Rate
    collectives: Mapping[str, Rate] = field(default_factory=lambda: MappingProxyType({}))
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator, or the share of a CPU that one rank has.

    Attributes:
        name: as the table and users write it: ``"H100-80GB"``.
        type: ``"cuda"`` or ``"cpu"``.
        memory_bytes: of one device.
        memory_bytes_per_s: memory bandwidth.
        flops_per_s: dense peak by dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"float8"``.
        launch_s: seconds that starting one operator costs at least.
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
    source: str = ""


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
