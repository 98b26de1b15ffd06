"""Clusters of tests of the estimate."""

from __future__ import annotations

from dataclasses import replace

from atorch_ns.cluster import Cluster


def started_at_once(cluster: Cluster) -> Cluster:
    """The cluster with hosts that start operators in no time: its devices alone decide."""
    assert cluster.hardware is not None
    device = replace(cluster.hardware.device, launch_s=0.0)
    return replace(cluster, hardware=replace(cluster.hardware, device=device))
