"""A training job: what the user gave, what methods decide about it, and what comes out."""

from atorch_ns.cluster.memory_limit import is_out_of_memory, limit_memory
from atorch_ns.cluster.process_memory import track_memory
from atorch_ns.job.agreement import SameBatch
from atorch_ns.job.gradients import SkipSync
from atorch_ns.job.inputs import Inputs
from atorch_ns.job.job import OPTIMIZER, Job, KeptActivations
from atorch_ns.job.loss import Autocast, LossScaling, first_loss
from atorch_ns.job.materialise import Materialiser, is_on_meta, is_poisoned, local_part
from atorch_ns.job.memory_use import PeakMemory, state_bytes
from atorch_ns.job.model import parameter_names
from atorch_ns.job.optimizer.checks import keeps_blocks
from atorch_ns.job.optimizer.step_optimizer import StepOptimizer
from atorch_ns.job.optimizer.user_optimizer import (
    explained_groups,
    make_user_optimizer,
    optimizer_arguments,
    step_on_local_parts,
)
from atorch_ns.job.randomness import SharedRandomness
from atorch_ns.job.result import MethodRow, Report, Result
from atorch_ns.job.states import (
    OptimizerStates,
    ParameterStates,
    StateSpec,
    StateValue,
    TrainingStates,
    on_all_stages,
)
from atorch_ns.job.train_step import TrainStep

__all__ = [
    "OPTIMIZER", "Autocast", "Inputs", "Job", "KeptActivations", "LossScaling", "Materialiser",
    "MethodRow", "OptimizerStates", "ParameterStates", "PeakMemory", "Report", "Result", "SameBatch",
    "SharedRandomness", "SkipSync", "StateSpec", "StateValue", "StepOptimizer", "TrainStep",
    "TrainingStates", "explained_groups", "first_loss", "is_on_meta", "is_out_of_memory", "is_poisoned",
    "keeps_blocks", "limit_memory", "local_part", "make_user_optimizer", "on_all_stages",
    "optimizer_arguments", "parameter_names", "state_bytes", "step_on_local_parts", "track_memory",
]  # fmt: skip
