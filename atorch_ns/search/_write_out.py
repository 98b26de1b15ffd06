"""Strategies written out as candidates: labelled, priced, ordered, each of them once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.estimate import Estimate, PlanTable, price
from atorch_ns.method import Resolved, resolve
from atorch_ns.search._candidate import Candidate, Pruned
from atorch_ns.search._grounds import grounds_of
from atorch_ns.search._priced import PricedRows
from atorch_ns.search._same import effective
from atorch_ns.search._scope import Scope
from atorch_ns.search._select import Limits, Picked, memory_limit
from atorch_ns.search._templates import Templates, steps_of
from atorch_ns.search._wishes import Wishes
from atorch_ns.search._words import key_of, label_of
from atorch_ns.strategy import Plan, Strategy

__all__ = ["CandidateWriter"]

MAX_SAME = 20
"""Strategies that amount to another, written out for the report."""


class CandidateWriter:
    """Writes out strategies.

    Args:
        scope: what the search is about.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def write_out(
        self, picked: Picked, rows: PricedRows, limit: Limits, baseline: Resolved | None, wishes: Wishes
    ) -> list[Candidate]:
        """The picked rows as candidates, each of them once, the baseline among them."""
        resolved: dict[str, tuple[Resolved, Estimate | None]] = {}
        for row in (*picked.fitting, *picked.too_large):
            steps = rows.steps(row)
            try:
                one = resolve(
                    self._scope.in_order(Strategy(steps)), self._scope.cluster, self._scope.registry
                )
            except StrategyError:  # a size that a method refuses on this mesh
                continue
            if wishes.unmet(one.chosen) is None:
                resolved.setdefault(key_of(one.strategy.steps), (one, rows.estimate(row)))
        key = None
        if baseline is not None:
            key = key_of(baseline.strategy.steps)
            if key not in resolved:
                resolved[key] = (baseline, self._scope.estimates([baseline])[0])
        twins = _twins({name: one for name, (one, _) in resolved.items()}, key)
        candidates = []
        for name, (one, estimated) in resolved.items():
            candidate = self.candidate(one, estimated, is_baseline=name == key, limit=limit)
            if name in twins:
                twin = resolved[twins[name]][0]
                label = label_of(twin.strategy.steps, leave_out=self._unsaid(twin))
                pruned = Pruned(kind="same", reason=f"amounts to {label} on this cluster")
                candidate = replace(candidate, pruned=pruned)
            candidates.append(candidate)
        plans = [one.plan for one, _ in resolved.values()]
        candidates = self._ordered(self._with_batches(candidates, plans, limit))
        return candidates if key is not None else _mark_simplest(candidates)

    def duplicates(self, templates: Templates) -> list[Candidate]:
        """Strategies that amount to another, for the report."""
        found = []
        for resolved, twin in templates.same[:MAX_SAME]:
            chosen = resolve(
                Strategy(steps_of(twin.chosen, twin.group.first)),
                self._scope.cluster,
                self._scope.registry,
            )
            label = label_of(chosen.strategy.steps, leave_out=self._unsaid(chosen))
            candidate = self.candidate(resolved, None)
            reason = f"amounts to {label} on this cluster"
            found.append(replace(candidate, pruned=Pruned(kind="same", reason=reason)))
        return found

    def candidate(
        self,
        resolved: Resolved,
        estimated: Estimate | None,
        *,
        is_baseline: bool = False,
        limit: Limits | None = None,
    ) -> Candidate:
        """One strategy as a candidate, pruned if its predicted peak is beyond the limit."""
        steps = resolved.strategy.steps
        limit = limit or memory_limit(self._scope.cluster, self._scope.settings)
        pruned = None
        if estimated is not None and not limit.admits(estimated.peak_bytes):
            pruned = Pruned(kind="memory", reason=limit.refusal(estimated))
        return Candidate(
            key=key_of(steps),
            steps=tuple((step.name, step.config) for step in steps),
            label=label_of(steps, leave_out=self._unsaid(resolved)),
            estimate=estimated,
            is_baseline=is_baseline,
            pruned=pruned,
            setup_seconds=_setup_seconds(resolved, self._scope.cluster),
            grounds=grounds_of(resolved),
        )

    def _unsaid(self, resolved: Resolved) -> list[str]:
        """Methods that every strategy has in this form."""
        left = [item for item in resolved.chosen if item.method.default_for is None]
        plain_mesh = resolved.plan.size("data") == self._scope.cluster.world_size
        return [
            item.method.name
            for item in resolved.chosen
            if item.method.default_for == "mesh" and plain_mesh and (left or len(resolved.chosen) > 1)
        ]

    def _with_batches(self, candidates: list[Candidate], plans: list[Plan], limit: Limits) -> list[Candidate]:
        """For the objective of the largest batch: how far each could go."""
        if self._scope.settings.objective != "batch" or any(one.estimate is None for one in candidates):
            return candidates
        table = PlanTable.of(plans)
        largest = np.zeros(len(table), dtype=np.int64)
        peaks = np.zeros(len(table))
        for power in range(16):
            batch = self._scope.workload.global_batch << power
            prices = price(
                table,
                self._scope.profile,
                self._scope.cluster,
                replace(self._scope.workload, global_batch=batch),
            )
            fits = limit.admit(prices.peak_bytes)
            if power and limit.num_bytes:  # the given batch is tried where it may just fit; others must fit
                fits = prices.peak_bytes <= limit.num_bytes
            largest[fits] = batch
            peaks[fits] = prices.peak_bytes[fits]
            if not fits.any():
                break
        given = self._scope.workload.global_batch
        return [
            replace(one, largest_batch=int(size), largest_batch_bytes=float(peak), given_batch=given)
            for one, size, peak in zip(candidates, largest, peaks, strict=True)
        ]

    def _ordered(self, candidates: list[Candidate]) -> list[Candidate]:
        def order(one: Candidate) -> tuple[Any, ...]:
            if one.estimate is None:
                return (one.pruned is not None, 0.0, len(one.steps), one.key)
            first = {
                "memory": one.estimate.peak_bytes,
                "batch": -float(one.largest_batch or 0),
            }.get(self._scope.settings.objective, one.estimate.step_seconds)
            return (one.pruned is not None, first, one.estimate.step_seconds, len(one.steps), one.key)

        return sorted(candidates, key=order)


def _twins(resolved: dict[str, Resolved], baseline: str | None) -> dict[str, str]:
    """Keys of strategies that run like another, with that other's; the baseline is kept, else the first."""
    first: dict[Plan, str] = {}
    if baseline is not None:
        first[effective(resolved[baseline].plan)] = baseline
    found = {}
    for name, one in resolved.items():
        kept = first.setdefault(effective(one.plan), name)
        if kept != name:
            found[name] = kept
    return found


def _mark_simplest(candidates: list[Candidate]) -> list[Candidate]:
    """Holds the others against the simplest strategy, where the plain one may not be used."""
    free = [one for one in candidates if one.pruned is None] or candidates
    simplest = min(free, key=lambda one: len(one.steps))
    return [replace(one, is_baseline=one is simplest) for one in candidates]


def _setup_seconds(resolved: Resolved, cluster: Cluster) -> float:
    """What compilation adds to a trial: inductor took 20 to 60 s for a block on 2 CPU cores, about 20 on GPUs."""
    if not resolved.plan.compiled:
        return 0.0
    return 40.0 if cluster.device_type == "cpu" else 20.0
