"""What a job runs on: processes, devices, axes and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atorch_ns.cluster._agreement import agree, same_everywhere
from atorch_ns.cluster._calibrate import calibrate
from atorch_ns.cluster._cluster import OPTIONAL_PACKAGES, Cluster, installed_packages
from atorch_ns.cluster._devices import DEVICES
from atorch_ns.cluster._hardware import Device, Hardware, Link, Rate
from atorch_ns.cluster._launch import join_process_group
from atorch_ns.cluster._layout import AXES, check_axes, fit, layout, mesh_ranks
from atorch_ns.cluster._link_speed import RING_STEPS
from atorch_ns.cluster._links import LINKS

if TYPE_CHECKING:
    from atorch_ns.cluster._mesh import Mesh

__all__ = [
    "AXES",
    "DEVICES",
    "LINKS",
    "OPTIONAL_PACKAGES",
    "RING_STEPS",
    "Cluster",
    "Device",
    "Hardware",
    "Link",
    "Mesh",
    "Rate",
    "agree",
    "calibrate",
    "check_axes",
    "fit",
    "installed_packages",
    "join_process_group",
    "layout",
    "mesh_ranks",
    "same_everywhere",
]


def __getattr__(name: str) -> object:
    if name == "Mesh":  # the one name here that needs torch
        from atorch_ns.cluster._mesh import Mesh

        return Mesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
