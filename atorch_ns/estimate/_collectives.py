"""What a plan communicates in one step."""

from __future__ import annotations

from atorch_ns.estimate._estimate import Collective, Workload
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan

__all__ = ["collectives"]


def collectives(plan: Plan, trace: Trace, workload: Workload) -> tuple[Collective, ...]:
    """Placeholder until the model of communication stands."""
    return ()
