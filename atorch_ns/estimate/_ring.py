"""Seconds of collectives on a cluster's links: rings of α-β messages, hierarchical where they span nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atorch_ns.cluster import RING_STEPS, Cluster, Hardware, Link

__all__ = ["Groups", "collective_seconds", "groups_along"]


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that a collective runs in, all alike.

    Attributes:
        size: [N] ranks in each.
        within: [N] of them in one node.
    """

    size: np.ndarray
    within: np.ndarray


def groups_along(inner: np.ndarray, size: np.ndarray, cluster: Cluster) -> Groups:
    """The groups along an axis.

    Args:
        inner: [N] product of the sizes of the axes inside it: the distance of neighbours in rank numbers.
        size: [N] of the axis.
        cluster: with its processes per node.
    """
    per_node = max(1, cluster.local_world_size)
    return Groups(size, np.minimum(size, np.maximum(1, per_node // inner)))


def collective_seconds(
    kind: str,
    num_bytes: np.ndarray | float,
    groups: Groups,
    hardware: Hardware,
    count: np.ndarray | float = 1,
) -> np.ndarray:
    """[N] seconds of ``count`` collectives that move ``num_bytes`` together.

    Within a node of k ranks, a ring sends ``steps (k - 1)`` messages of 1/k of the tensor. Where a group
    spans m nodes, the tensor is first divided within the node; each rank then takes part in a ring over the
    nodes with its share, so a node's adapters work side by side.

    Args:
        kind: as in :class:`~atorch_ns.estimate.Collective`.
        num_bytes: of the whole tensors of all calls.
        groups: the ranks.
        hardware: the links.
        count: calls.
    """
    within = groups.within
    nodes = np.maximum(1, groups.size // np.maximum(1, within))
    inside = _ring(kind, num_bytes, within, hardware.within_node, count)
    outside = _ring(kind, num_bytes / within, nodes, hardware.between_nodes, count)
    return np.asarray(inside + outside)


def _ring(
    kind: str, num_bytes: np.ndarray | float, ranks: np.ndarray, link: Link, count: np.ndarray | float
) -> np.ndarray:
    rate, steps = link.rate_of(kind), RING_STEPS[kind]
    messages = steps * (ranks - 1)
    return np.asarray(
        messages * (count * rate.latency_s + num_bytes / np.maximum(1, ranks) / rate.bytes_per_s)
    )
