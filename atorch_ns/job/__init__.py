"""A training job: what the user gave, what methods decide about it, and what comes out."""

from __future__ import annotations

from atorch_ns.job._apply import apply_strategy
from atorch_ns.job._build import build, make_user_optimizer
from atorch_ns.job._clip import clip_gradients, gradient_norm
from atorch_ns.job._dry_run import dry_run
from atorch_ns.job._fused import optimizer_arguments
from atorch_ns.job._gradient_sums import GradientSums
from atorch_ns.job._gradient_sync import SkipSync
from atorch_ns.job._inputs import Inputs
from atorch_ns.job._job import OPTIMIZER, Autocast, Job, LossScaling
from atorch_ns.job._layout import divided_like, local_part
from atorch_ns.job._loss import first_loss
from atorch_ns.job._materialise import Materialiser, is_on_meta
from atorch_ns.job._memory_use import MemoryTracker, PeakMemory, StateBytes, state_bytes, track_memory
from atorch_ns.job._optim_func import explained_groups
from atorch_ns.job._optimizer import StepOptimizer, inner_optimizer
from atorch_ns.job._optimizer_limits import keeps_blocks
from atorch_ns.job._packing import Packing
from atorch_ns.job._parameter_states import ParameterStates
from atorch_ns.job._randomness import SharedRandomness
from atorch_ns.job._report import MethodRow, Report
from atorch_ns.job._result import Result
from atorch_ns.job._runner import BatchRunner, MakeRunner
from atorch_ns.job._stages import in_user_order, on_all_stages
from atorch_ns.job._states import (
    MakeStates,
    OptimizerStates,
    StateSpec,
    StateValue,
    TrainingStates,
    parameter_names,
)
from atorch_ns.job._step_times import StepSummary, StepTimes
from atorch_ns.job._train_step import TrainStep

__all__ = [
    "OPTIMIZER",
    "Autocast",
    "BatchRunner",
    "GradientSums",
    "Inputs",
    "Job",
    "LossScaling",
    "MakeRunner",
    "MakeStates",
    "Materialiser",
    "MemoryTracker",
    "MethodRow",
    "OptimizerStates",
    "Packing",
    "ParameterStates",
    "PeakMemory",
    "Report",
    "Result",
    "SharedRandomness",
    "SkipSync",
    "StateBytes",
    "StateSpec",
    "StateValue",
    "StepOptimizer",
    "StepSummary",
    "StepTimes",
    "TrainStep",
    "TrainingStates",
    "apply_strategy",
    "build",
    "clip_gradients",
    "divided_like",
    "dry_run",
    "explained_groups",
    "first_loss",
    "gradient_norm",
    "in_user_order",
    "inner_optimizer",
    "is_on_meta",
    "keeps_blocks",
    "local_part",
    "make_user_optimizer",
    "on_all_stages",
    "optimizer_arguments",
    "parameter_names",
    "state_bytes",
    "track_memory",
]
