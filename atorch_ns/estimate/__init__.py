"""Estimates: plans and a profile on a cluster, priced in bytes and seconds."""

from __future__ import annotations

from atorch_ns.estimate._axis_use import AxisUse
from atorch_ns.estimate._collectives import unpredicted
from atorch_ns.estimate._estimate import Collective, Estimate, MemoryParts, TimeParts, Workload
from atorch_ns.estimate._price import Prices, estimate, price
from atorch_ns.estimate._table import PlanTable, kind_of

__all__ = [
    "AxisUse",
    "Collective",
    "Estimate",
    "MemoryParts",
    "PlanTable",
    "Prices",
    "TimeParts",
    "Workload",
    "estimate",
    "kind_of",
    "price",
    "unpredicted",
]
