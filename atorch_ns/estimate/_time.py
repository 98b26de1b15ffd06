"""Step time of plans."""

from __future__ import annotations

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate._estimate import TimeParts, Workload
from atorch_ns.estimate._memo import Memo
from atorch_ns.estimate._table import PlanTable
from atorch_ns.estimate._time_of_kind import price_kind
from atorch_ns.profile import Trace

__all__ = ["price_time"]


def price_time(
    table: PlanTable, trace: Trace, cluster: Cluster, workload: Workload, *, memo: Memo | None = None
) -> np.ndarray:
    """Seconds of one step of every plan.

    Args:
        table: N plans.
        trace: what one step of the model costs.
        cluster: with hardware.
        workload: samples and tokens of a step.
        memo: of the same table, trace and workload.

    Returns:
        [N, 9] seconds, columns as :class:`TimeParts`.
    """
    times = np.zeros((len(table), len(TimeParts._fields)))
    memo = memo or Memo()
    for kind, plan in enumerate(table.templates):
        rows, sizes = table.sizes(kind, workload, memo)
        if rows.size:
            times[rows] = price_kind(plan, sizes, trace, cluster, workload, memo)
    return times
