"""Step time of plans."""

from __future__ import annotations

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate._estimate import Workload
from atorch_ns.estimate._table import PlanTable
from atorch_ns.profile import Trace

__all__ = ["price_time"]


def price_time(table: PlanTable, trace: Trace, cluster: Cluster, workload: Workload) -> np.ndarray:
    """Placeholder until the model of time stands."""
    return np.zeros((len(table), 8))
