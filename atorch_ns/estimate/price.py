"""Pricing plans: memory and time of every row of a table, by array operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.estimate.auto_schedule import with_chosen_schedules
from atorch_ns.estimate.estimate import Estimate, MemoryParts, TimeParts, Workload
from atorch_ns.estimate.intervals import Intervals, intervals_of
from atorch_ns.estimate.memory.peak import price_memory
from atorch_ns.estimate.model_shard import Memo
from atorch_ns.estimate.table import PlanTable, with_chosen_reductions
from atorch_ns.estimate.time.predicted_collectives import collectives
from atorch_ns.estimate.time.step import price_time
from atorch_ns.profile import Profile
from atorch_ns.strategy import AxisUse, Plan


@dataclass(frozen=True)
class Prices:
    """Memory and time of every plan of a table; all figures are predictions.

    Attributes:
        memory: [N, 7] bytes, columns as :class:`MemoryParts`, at the worst moment of each plan.
        time: [N, 9] seconds, columns as :class:`TimeParts`.
        peak_at: [N] index into ``moments``.
        moments: names of the moments of a step.
        intervals: uncertainty of the figures, as factors.
    """

    memory: np.ndarray
    time: np.ndarray
    peak_at: np.ndarray
    moments: tuple[str, ...]
    intervals: Intervals

    @property
    def peak_bytes(self) -> np.ndarray:
        """[N] bytes per rank."""
        return np.asarray(self.memory.sum(axis=1))

    @property
    def step_seconds(self) -> np.ndarray:
        """[N] seconds per step."""
        return np.asarray(self.time.sum(axis=1))

    def replaced(self, rows: np.ndarray, others: Prices, other_rows: np.ndarray) -> Prices:
        """These prices with those of the rows of a mask from as many rows elsewhere."""
        columns = {name: getattr(self, name).copy() for name in ("memory", "time", "peak_at")}
        for name, column in columns.items():
            column[rows] = getattr(others, name)[other_rows]
        return replace(self, **columns)

    def estimate(self, row: int) -> Estimate:
        """The figures of one plan, without its collectives."""
        return Estimate(
            memory=MemoryParts(*map(float, self.memory[row])),
            time=TimeParts(*map(float, self.time[row])),
            peak_at=self.moments[int(self.peak_at[row])],
            intervals=self.intervals,
        )


def price(table: PlanTable, profile: Profile, cluster: Cluster, workload: Workload) -> Prices:
    """Prices all plans of a table.

    Raises:
        InputError: if the profile has no trace, or the cluster no hardware figures.
    """
    if profile.trace is None:
        raise InputError("an estimate needs a trace of the model; make the profile with profile_model().")
    if cluster.hardware is None:
        raise InputError("an estimate needs the cluster's hardware; see Cluster.with_hardware().")
    memo = Memo()
    # What plans leave open is decided first, so that memory and time are those of one plan.
    table = with_chosen_schedules(table, profile.trace, cluster, workload, memo=memo)
    table = with_chosen_reductions(table, profile.num_trainable, cluster.rank_memory_bytes)
    memory, peak_at, moments = price_memory(
        table,
        profile.trace,
        workload,
        device_type=cluster.device_type,
        capability=cluster.capability,
        memo=memo,
    )
    time = price_time(table, profile.trace, cluster, workload, memo=memo)
    return Prices(memory, time, peak_at, moments, intervals_of(cluster.hardware, profile))


def estimate(plan: Plan, profile: Profile, cluster: Cluster, workload: Workload) -> Estimate:
    """Prices one plan, with its collectives."""
    table = PlanTable.of([plan])
    prices = price(table, profile, cluster, workload)
    assert profile.trace is not None
    # Collectives need the choices that the prices were made with, which prices do not hold.
    if plan.pipeline.schedule == "auto" or plan.recomputation.share is not None:
        choice = with_chosen_schedules(table, profile.trace, cluster, workload, memo=Memo())
        plan = AxisUse.of(choice.plan(0)).onto(plan)
    reduces_each = plan.reduces_each(profile.num_trainable, cluster.rank_memory_bytes)
    plan = plan.changed(sharding={"reduces_each": reduces_each})
    return replace(prices.estimate(0), collectives=collectives(plan, profile.trace, workload))
