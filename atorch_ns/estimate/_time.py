"""Step time of plans."""

from __future__ import annotations

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate._estimate import TimeParts, Workload
from atorch_ns.estimate._table import PlanTable
from atorch_ns.estimate._time_of_kind import price_kind
from atorch_ns.profile import Trace

__all__ = ["price_time"]


def price_time(table: PlanTable, trace: Trace, cluster: Cluster, workload: Workload) -> np.ndarray:
    """Seconds of one step of every plan.

    Args:
        table: N plans.
        trace: what one step of the model costs.
        cluster: with hardware.
        workload: samples and tokens of a step.

    Returns:
        [N, 8] seconds, columns as :class:`TimeParts`.
    """
    times = np.zeros((len(table), len(TimeParts._fields)))
    for kind, plan in enumerate(table.templates):
        rows = np.flatnonzero(table.template == kind)
        if rows.size:
            sizes = (table.data[rows], table.zero[rows], table.micro_batches[rows])
            times[rows] = price_kind(plan, *sizes, trace, cluster, workload)
    return times
