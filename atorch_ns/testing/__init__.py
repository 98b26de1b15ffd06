"""Testing tools: cases, forked ranks and parity, for this package and for third-party methods.

``workers``: a function on several forked ranks. ``models``: small reference models with data and loss.
``parity``: whether a run trains the same model as one process with plain torch.

Nothing here is imported by the rest of the package.
"""

from __future__ import annotations

from atorch_ns.testing.models import CASES, Case, SyntheticDataset, get_case, map_tensors, take
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
from atorch_ns.testing.workers import Outcome, WorkerFailure, catch_ranks, reserve_port, run_ranks

__all__ = [
    "ADAMW",
    "BF16_GLOBAL_BATCH",
    "CASES",
    "Case",
    "Outcome",
    "ParityReport",
    "SyntheticDataset",
    "Trajectory",
    "WorkerFailure",
    "assert_parity",
    "assert_ranks_agree",
    "canonical_name",
    "catch_ranks",
    "compare",
    "get_case",
    "map_tensors",
    "reference_run",
    "reserve_port",
    "run_ranks",
    "snapshot",
    "take",
    "train",
]
