"""Costs of collectives: seconds on the links of a cluster, and the buckets in which gradients travel."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from atorch_ns.cluster.cluster import Cluster
from atorch_ns.cluster.hardware import Hardware, Link
from atorch_ns.cluster.speed_probes import RING_STEPS

DEFAULT_BUCKET_BYTES: Final = 25 * 2**20
"""``bucket_cap_mb`` of torch's DistributedDataParallel where none is given."""

NUM_REPORTED: Final = 9
"""Numbers that ranks exchange with the last bucket, beside one for each parameter: their position, and
whether their trained parameters have changed (``atorch_ns.job.reducer``)."""

FIRST_BUCKET_BYTES: Final = 2**20
"""``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``: a small first bucket starts to communicate early. A size
that the user gives holds for the first bucket too."""


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that a collective runs in, all alike.

    Attributes:
        size: [N] ranks in each.
        within: [N] ranks of each in one node.
    """

    size: np.ndarray
    within: np.ndarray


def groups_along(inner: np.ndarray, size: np.ndarray, cluster: Cluster) -> Groups:
    """The groups along an axis.

    Args:
        inner: [N] product of the sizes of the axes inside it: the distance of neighbours in rank numbers.
        size: [N] sizes of the axis.
        cluster: the cluster, with its processes per node.
    """
    per_node = max(1, cluster.local_world_size)
    return Groups(size, np.minimum(size, np.maximum(1, per_node // inner)))


def collective_seconds(
    kind: str,
    num_bytes: np.ndarray | float,
    groups: Groups,
    hardware: Hardware,
    *,
    count: np.ndarray | float = 1,
) -> np.ndarray:
    """[N] seconds of ``count`` collectives that move ``num_bytes`` together.

    Within a node of k ranks, a ring sends ``steps (k - 1)`` messages of 1/k of the tensor. Where a group
    spans m nodes, the tensor is first divided within the node; each rank then takes part in a ring over the
    nodes with its share, so a node's adapters work side by side.

    Args:
        kind: kind of collective, as in :class:`~atorch_ns.estimate.Collective`.
        num_bytes: bytes of the whole tensors of all calls.
        count: the number of calls.
    """
    within = groups.within
    nodes = np.maximum(1, groups.size // np.maximum(1, within))
    inside = _ring_seconds(kind, num_bytes, within, hardware.within_node, count=count)
    outside = _ring_seconds(kind, num_bytes / within, nodes, hardware.between_nodes, count=count)
    return np.asarray(inside + outside)


def _ring_seconds(
    kind: str, num_bytes: np.ndarray | float, ranks: np.ndarray, link: Link, *, count: np.ndarray | float
) -> np.ndarray:
    messages = RING_STEPS[kind] * (ranks - 1) * count
    each = num_bytes / np.maximum(1, ranks) / np.maximum(1, count)
    return np.asarray(messages * link.message_seconds(kind, each))


def gradient_buckets(sizes: Iterable[tuple[Hashable, int]], bucket_bytes: int) -> list[list[int]]:
    """Returns the positions of each bucket's gradients, in the order in which buckets are closed.

    A bucket is closed by the gradient that fills it. Each kind has its own.

    Args:
        sizes: kind (dtype and device) and bytes of each gradient, in the order in which they arrive.
        bucket_bytes: the least size of a bucket but the last of each kind; 0 for the default.
    """
    cap = bucket_bytes or DEFAULT_BUCKET_BYTES
    first = FIRST_BUCKET_BYTES if cap == DEFAULT_BUCKET_BYTES else cap
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    limits: dict[Hashable, int] = {}
    for index, (kind, num_bytes) in enumerate(sizes):
        places, size = filling.pop(kind, ([], 0))
        places, size = [*places, index], size + num_bytes
        if size >= limits.get(kind, first):
            buckets.append(places)
            limits[kind] = cap
        else:
            filling[kind] = (places, size)
    return [*buckets, *(places for places, _ in filling.values())]
