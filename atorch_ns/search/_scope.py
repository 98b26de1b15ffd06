"""What a search is about, and what every step of it asks of that."""

from __future__ import annotations

from dataclasses import dataclass

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import Estimate, PlanTable, Workload, price
from atorch_ns.method import Registry, Resolved, resolve
from atorch_ns.profile import Profile
from atorch_ns.search._settings import SearchSettings
from atorch_ns.strategy import Strategy

__all__ = ["Scope"]


@dataclass(frozen=True)
class Scope:
    """The model, where it is trained, on how much, with which methods and settings."""

    profile: Profile
    cluster: Cluster
    workload: Workload
    registry: Registry
    settings: SearchSettings

    def canonical(self, resolved: Resolved) -> Resolved:
        """The same strategy with the methods of a phase in the registry's order, as in every candidate."""
        strategy = self.in_order(resolved.strategy)
        return resolve(strategy, self.cluster, self.registry, profile=self.profile)

    def in_order(self, strategy: Strategy) -> Strategy:
        """A strategy with its methods in the registry's order."""
        order = {method.name: index for index, method in enumerate(self.registry)}
        return Strategy(sorted(strategy.steps, key=lambda step: order[step.name]))

    def estimates(self, resolved: list[Resolved]) -> list[Estimate | None]:
        """A price for each strategy, where there is a trace and hardware to price it with."""
        if self.profile.trace is None or self.cluster.hardware is None:
            return [None] * len(resolved)
        table = PlanTable.of([one.plan for one in resolved])
        prices = price(table, self.profile, self.cluster, self.workload)
        return [prices.estimate(row) for row in range(len(resolved))]
