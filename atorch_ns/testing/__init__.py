"""Testing tools: cases, forked ranks and parity, for this package and for third-party methods.

``workers``: calls on several forked ranks. ``models``: small reference models with data and loss.
``parity``: comparison of a run with one process and plain torch.

The rest of the package imports nothing from here.
"""

from atorch_ns.capture.nests import map_tensors
from atorch_ns.processes.ranks import reserve_port
from atorch_ns.testing.models import CASES, Case, SyntheticDataset, get_case, take
from atorch_ns.testing.parity import (
    ADAMW,
    BF16_GLOBAL_BATCH,
    ParityReport,
    Trajectory,
    assert_parity,
    assert_ranks_agree,
    canonical_name,
    compare,
    reference_run,
    snapshot,
    train,
)
from atorch_ns.testing.rank_pool import Outcome
from atorch_ns.testing.workers import WorkerFailure, catch_ranks, run_ranks

__all__ = [
    "ADAMW", "BF16_GLOBAL_BATCH", "CASES", "Case", "Outcome", "ParityReport", "SyntheticDataset", "Trajectory",
    "WorkerFailure", "assert_parity", "assert_ranks_agree", "canonical_name", "catch_ranks", "compare", "get_case",
    "map_tensors", "reference_run", "reserve_port", "run_ranks", "snapshot", "take", "train",
]  # fmt: skip
