"""Strategies: their forms, their file, and the plan that one amounts to."""

from atorch_ns.strategy.convert.atorch_pickle import convert_pickle
from atorch_ns.strategy.convert.base import Conversion, Remark
from atorch_ns.strategy.convert.convert import convert_file
from atorch_ns.strategy.diff import Difference, StrategyDiff, diff
from atorch_ns.strategy.file import Requires, json_schema
from atorch_ns.strategy.plan import (
    DATA_AXES,
    MODEL_AXES,
    AxisSize,
    AxisUse,
    Extra,
    NarrowProducts,
    PipelineParallelism,
    Plan,
    Recomputation,
)
from atorch_ns.strategy.strategy import Step, Strategy
from atorch_ns.strategy.values import JSON, canonical, canonical_text, qualified_name

__all__ = [
    "DATA_AXES", "JSON", "MODEL_AXES", "AxisSize", "AxisUse", "Conversion", "Difference", "Extra", "NarrowProducts",
    "PipelineParallelism", "Plan", "Recomputation", "Remark", "Requires", "Step", "Strategy", "StrategyDiff",
    "canonical", "canonical_text", "convert_file", "convert_pickle", "diff", "json_schema", "qualified_name",
]  # fmt: skip

for _public in (Requires, Step, Strategy):
    _public.__module__ = __name__  # pickles name the package, whatever the file is called
