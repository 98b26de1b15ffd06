"""What is known of a model without running it."""

from __future__ import annotations

from atorch_ns.profile._blocks import NamedModule, repeated_blocks
from atorch_ns.profile._compact import CompactStates, plain_tensors
from atorch_ns.profile._database import BlockKey, BlockSeconds, ProfileDatabase
from atorch_ns.profile._precisions import ALL_PRECISIONS
from atorch_ns.profile._profile import Profile
from atorch_ns.profile._select import class_names, matches, select_modules, stand_for
from atorch_ns.profile._structure import copy_structure
from atorch_ns.profile._timing import device_name, measure_blocks
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
from atorch_ns.profile._tracing import profile_model

__all__ = [
    "ALL_PRECISIONS",
    "BlockKey",
    "BlockSeconds",
    "CompactStates",
    "Growth",
    "NamedModule",
    "OperatorCost",
    "OptimizerSpec",
    "ParameterSpec",
    "PhaseCost",
    "Profile",
    "ProfileDatabase",
    "Segment",
    "SegmentCost",
    "Trace",
    "class_names",
    "copy_structure",
    "device_name",
    "matches",
    "measure_blocks",
    "plain_tensors",
    "precision_key",
    "profile_model",
    "repeated_blocks",
    "select_modules",
    "stand_for",
]
