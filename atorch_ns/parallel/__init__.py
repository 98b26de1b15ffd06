"""nnScaler's front end: ``parallelize``, its configs, optimizer and state dicts."""

from atorch_ns.operators import register_op
from atorch_ns.parallel.config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from atorch_ns.parallel.module import ParallelModule
from atorch_ns.parallel.optimizer import ParallelOptimizer, build_optimizer
from atorch_ns.parallel.parallelize import parallelize
from atorch_ns.parallel.state_dicts import (
    broadcast_weights,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dict,
    load_merged_state_dicts,
    merge_state_dicts,
)

__all__ = [
    "BroadcastGenFilesStrategy", "ComputeConfig", "ParallelModule", "ParallelOptimizer", "ReuseType",
    "broadcast_weights", "build_optimizer", "deduped_state_dict", "load_deduped_state_dict",
    "load_merged_state_dict", "load_merged_state_dicts", "merge_state_dicts", "parallelize", "register_op",
]  # fmt: skip
