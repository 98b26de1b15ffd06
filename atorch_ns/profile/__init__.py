"""Profiles: a model's structure and the cost of its training step, found without running it."""

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.profile.compact_states import plain_tensors
from atorch_ns.profile.profile import Profile
from atorch_ns.profile.record.tensor_division import Divide, ParameterDims
from atorch_ns.profile.timing import ProfileDatabase, measure_blocks
from atorch_ns.profile.trace import (
    ForwardResult,
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
from atorch_ns.profile.tracing import profile_model
from atorch_ns.torch_compat import fused

__all__ = [
    "Divide", "ForwardResult", "Growth", "OperatorCost", "OptimizerSpec", "ParameterDims", "ParameterSpec", "PhaseCost", "Profile",
    "ProfileDatabase", "Segment", "SegmentCost", "Trace", "fused", "measure_blocks", "plain_tensors", "precision_key",
    "profile_model", "repeated_blocks",
]  # fmt: skip
