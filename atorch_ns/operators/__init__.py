"""Operators: a placement for each operator of a captured model, and the divided model that runs by it."""

from atorch_ns.operators.analysis import OperatorCost, costs_text, operator_costs
from atorch_ns.operators.choose import (
    Solved,
    batch_plan,
    check_plan,
    division_of,
    legal_rules,
    random_plan,
    refitted,
    solved_plan,
)
from atorch_ns.operators.divided.check import check_division
from atorch_ns.operators.divided.divide import Division
from atorch_ns.operators.divided.run import DividedForward
from atorch_ns.operators.graph.capture import CaptureError
from atorch_ns.operators.graph.graph import OperatorGraph
from atorch_ns.operators.graph.shallow import Shallow, capture_shallow
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.request import FoundPlan, Wanted, find_plan
from atorch_ns.operators.rules.custom import register_op
from atorch_ns.operators.solver.assemble import States, assemble
from atorch_ns.operators.solver.prices import Prices
from atorch_ns.operators.solver.stage_costs import PipelineTask
from atorch_ns.operators.staged import StagedPlan, staged_plan

__all__ = [
    "CaptureError",
    "DividedForward",
    "Division",
    "FoundPlan",
    "OperatorCost",
    "OperatorGraph",
    "OperatorPlan",
    "PipelineTask",
    "Prices",
    "Shallow",
    "Solved",
    "StagedPlan",
    "States",
    "Wanted",
    "assemble",
    "batch_plan",
    "capture_shallow",
    "check_division",
    "check_plan",
    "costs_text",
    "division_of",
    "find_plan",
    "legal_rules",
    "operator_costs",
    "random_plan",
    "refitted",
    "register_op",
    "solved_plan",
    "staged_plan",
]
