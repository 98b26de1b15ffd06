"""Strategies: what they are, the forms they take, their file, and the plan they amount to."""

from __future__ import annotations

from atorch_ns.strategy._conversion import Conversion, Remark
from atorch_ns.strategy._convert import convert_file
from atorch_ns.strategy._diff import Difference, StrategyDiff, diff
from atorch_ns.strategy._pickle import convert_pickle
from atorch_ns.strategy._plan import DATA_AXES, MODEL_AXES, AxisSize, Extra, NarrowProducts, Plan
from atorch_ns.strategy._requires import Requires
from atorch_ns.strategy._schema import json_schema
from atorch_ns.strategy._step import Step
from atorch_ns.strategy._strategy import Strategy
from atorch_ns.strategy._values import JSON, canonical, canonical_text, qualified_name

__all__ = [
    "DATA_AXES",
    "JSON",
    "MODEL_AXES",
    "AxisSize",
    "Conversion",
    "Difference",
    "Extra",
    "NarrowProducts",
    "Plan",
    "Remark",
    "Requires",
    "Step",
    "Strategy",
    "StrategyDiff",
    "canonical",
    "canonical_text",
    "convert_file",
    "convert_pickle",
    "diff",
    "json_schema",
    "qualified_name",
]
