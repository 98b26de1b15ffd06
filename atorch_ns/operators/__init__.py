"""Operators: a placement for each operator of a captured model, and the divided model that runs by it."""

from atorch_ns.operators.choose import batch_plan, division_of, legal_rules, random_plan
from atorch_ns.operators.graph import OperatorGraph
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.run import DividedForward
from atorch_ns.operators.shallow import Shallow, capture_shallow

__all__ = [
    "DividedForward",
    "OperatorGraph",
    "OperatorPlan",
    "Shallow",
    "batch_plan",
    "capture_shallow",
    "division_of",
    "legal_rules",
    "random_plan",
]
