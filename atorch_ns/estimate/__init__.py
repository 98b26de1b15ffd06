"""Estimates: plans and a profile on a cluster, priced in bytes and seconds."""

from atorch_ns.estimate.estimate import Collective, Estimate, MemoryParts, TimeParts, Workload
from atorch_ns.estimate.intervals import Intervals
from atorch_ns.estimate.price import Prices, estimate, price
from atorch_ns.estimate.table import PlanTable, template_of
from atorch_ns.estimate.time.predicted_collectives import unpredicted_reason

__all__ = [
    "Collective", "Estimate", "Intervals", "MemoryParts", "PlanTable", "Prices", "TimeParts", "Workload", "estimate",
    "price", "template_of", "unpredicted_reason",
]  # fmt: skip
