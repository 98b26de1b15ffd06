"""Costs of operators and collectives: one count and one price, which estimates, operator plans and pipelines share."""

from atorch_ns.costs.collectives import Groups, collective_seconds, groups_along
from atorch_ns.costs.count import OperatorCounter, OperatorCounts, count_flops, moved_bytes
from atorch_ns.costs.price import counted_seconds, host_seconds, kernel_seconds

__all__ = [
    "Groups",
    "OperatorCounter",
    "OperatorCounts",
    "collective_seconds",
    "count_flops",
    "counted_seconds",
    "groups_along",
    "host_seconds",
    "kernel_seconds",
    "moved_bytes",
]
