"""Operators: a placement for each operator of a captured model, and the divided model that runs by it."""

from atorch_ns.capture.graph.capture import CaptureError
from atorch_ns.capture.graph.operator_graph import OperatorGraph, Shallow, capture_shallow
from atorch_ns.operators.choose import (
    Solved,
    Wanted,
    batch_plan,
    check_plan,
    costs_text,
    division_of,
    find_plan,
    legal_rules,
    operator_costs,
    random_plan,
    refit_plan,
    solved_plan,
)
from atorch_ns.operators.divided.check import check_division
from atorch_ns.operators.divided.divide import OperatorDivision
from atorch_ns.operators.divided.run import DividedForward
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.rules.custom import register_op
from atorch_ns.operators.solver.assemble import States, assemble
from atorch_ns.operators.solver.prices import OperatorPrices
from atorch_ns.operators.staged import staged_plan
from atorch_ns.pipeline.plan.stage_costs import PipelineTask

__all__ = [
    "CaptureError", "DividedForward", "OperatorDivision", "OperatorGraph", "OperatorPlan", "OperatorPrices",
    "PipelineTask", "Shallow", "Solved", "States", "Wanted", "assemble", "batch_plan", "capture_shallow",
    "check_division", "check_plan", "costs_text", "division_of", "find_plan", "legal_rules", "operator_costs",
    "random_plan", "refit_plan", "register_op", "solved_plan", "staged_plan",
]  # fmt: skip
