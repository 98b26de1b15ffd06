"""Peak memory of plans."""

from __future__ import annotations

import numpy as np

from atorch_ns.estimate._estimate import Workload
from atorch_ns.estimate._table import PlanTable
from atorch_ns.profile import Trace

__all__ = ["price_memory"]


def price_memory(
    table: PlanTable, trace: Trace, workload: Workload
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Placeholder until the model of memory stands."""
    return np.zeros((len(table), 6)), np.zeros(len(table), dtype=np.int64), ("forward",)
