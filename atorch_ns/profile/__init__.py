"""What is known of a model without running it."""

from __future__ import annotations

from atorch_ns.profile._blocks import NamedModule, repeated_blocks
from atorch_ns.profile._profile import Profile
from atorch_ns.profile._select import class_names, matches, select_modules, stand_for
from atorch_ns.profile._trace import (
    Growth,
    OperatorCost,
    OptimizerSpec,
    ParameterSpec,
    PhaseCost,
    Segment,
    SegmentCost,
    Trace,
    precision_key,
)

__all__ = [
    "Growth",
    "NamedModule",
    "OperatorCost",
    "OptimizerSpec",
    "ParameterSpec",
    "PhaseCost",
    "Profile",
    "Segment",
    "SegmentCost",
    "Trace",
    "class_names",
    "matches",
    "precision_key",
    "repeated_blocks",
    "select_modules",
    "stand_for",
]
