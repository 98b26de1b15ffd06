"""Cluster: processes, devices, links, mesh axes and process groups of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atorch_ns.cluster.agreement import (
    agree,
    from_first,
    gather_values,
    or_refusal,
    receive_nest,
    same_everywhere,
    send_nest,
    sharing_failures,
)
from atorch_ns.cluster.calibrate import calibrate
from atorch_ns.cluster.cluster import OPTIONAL_PACKAGES, Cluster, installed_packages
from atorch_ns.cluster.devices import DEVICES
from atorch_ns.cluster.hardware import LINKS, Device, Hardware, Link, Rate
from atorch_ns.cluster.kernels import AttentionKind
from atorch_ns.cluster.mesh import AXES, check_axes, fit, layout, mesh_ranks
from atorch_ns.cluster.process_group import join_process_group
from atorch_ns.cluster.spec import cluster_from_spec

if TYPE_CHECKING:
    from atorch_ns.cluster.mesh import Mesh

__all__ = [
    "AXES", "DEVICES", "LINKS", "OPTIONAL_PACKAGES", "AttentionKind", "Cluster", "Device", "Hardware", "Link", "Mesh",
    "Rate", "agree", "calibrate", "check_axes", "cluster_from_spec", "fit", "from_first", "gather_values",
    "installed_packages", "join_process_group", "layout", "mesh_ranks", "or_refusal", "receive_nest", "same_everywhere",
    "send_nest", "sharing_failures",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "Mesh":  # the one name here that needs torch
        from atorch_ns.cluster.mesh import Mesh

        return Mesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
