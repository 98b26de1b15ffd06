"""Costs of operators and collectives: one count and one price for estimates, operator plans and pipelines."""

from atorch_ns.costs.collectives import collective_seconds
from atorch_ns.costs.count import OperatorCounter, OperatorCounts
from atorch_ns.costs.price import counted_seconds, host_seconds

__all__ = ["OperatorCounter", "OperatorCounts", "collective_seconds", "counted_seconds", "host_seconds"]
