"""Candidates from priced rows: the best rows, resolved, labelled and ordered, each strategy once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.estimate import Estimate, PlanTable, Workload, price
from atorch_ns.method import Registry, Resolved, resolve
from atorch_ns.profile import Profile
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.space.candidate import Candidate, Pruned, key_of, label_of, refusal_keys
from atorch_ns.search.space.constraints import Constraints
from atorch_ns.search.space.equivalence import canonical
from atorch_ns.search.space.limits import Limits, RowSelection, memory_limit
from atorch_ns.search.space.priced import PricedRows
from atorch_ns.search.space.templates import Templates, steps_of
from atorch_ns.strategy import MODEL_AXES, Plan, Strategy


@dataclass(frozen=True)
class SearchContext:
    """Model, cluster, workload, methods and settings of a search."""

    profile: Profile
    cluster: Cluster
    workload: Workload
    registry: Registry
    settings: SearchSettings

    def resolve(self, strategy: Strategy, *, check_model: bool = False) -> Resolved:
        """A strategy resolved, with the methods of a phase in the registry's order, as in every candidate.

        Raises:
            StrategyError: if it cannot be used here or, where that is checked, on this model.
        """
        order = {method.name: index for index, method in enumerate(self.registry)}
        in_order = Strategy(sorted(strategy.steps, key=lambda step: order[step.name]))
        return resolve(in_order, self.cluster, self.registry, profile=self.profile if check_model else None)

    def estimates(self, strategies: list[Resolved]) -> list[Estimate | None]:
        """The price of each strategy; ``None`` without a trace or hardware figures."""
        if self.profile.trace is None or self.cluster.hardware is None:
            return [None] * len(strategies)
        table = PlanTable.of([strategy.plan for strategy in strategies])
        prices = price(table, self.profile, self.cluster, self.workload)
        return [prices.estimate(row) for row in range(len(strategies))]


MAX_SAME = 20  # most strategies that are reported as amounting to another


class CandidateWriter:
    """Makes candidates from strategies."""

    def __init__(self, context: SearchContext) -> None:
        self._context = context

    def write_out(
        self,
        selection: RowSelection,
        rows: PricedRows,
        limit: Limits,
        baseline: Resolved | None,
        *,
        constraints: Constraints,
        past: Sequence[Strategy] = (),
    ) -> list[Candidate]:
        """The selected rows as candidates, each once, with the baseline and the strategies tried before."""
        entries: dict[str, tuple[Resolved, Estimate | None]] = {}
        for row in (*selection.fitting, *selection.too_large):
            try:
                entry = self._context.resolve(Strategy(rows.steps(row)))
            except StrategyError:  # a size that a method refuses on this mesh
                continue
            if constraints.violation(entry.chosen) is None:
                entries.setdefault(key_of(entry.strategy.steps), (entry, rows.estimate(row)))
        key = None
        if baseline is not None:  # a candidate even where many others are faster by prediction
            key = key_of(baseline.strategy.steps)
            if key not in entries:
                entries[key] = (baseline, self._context.estimates([baseline])[0])
        for strategy in past:
            with contextlib.suppress(StrategyError):  # of another version, or no longer allowed
                entry = self._context.resolve(strategy)
                name = key_of(entry.strategy.steps)
                if name not in entries and constraints.violation(entry.chosen) is None:
                    entries[name] = (entry, self._context.estimates([entry])[0])
        plain = baseline and _without_sharding(baseline.plan)  # all plain strategies have this plan
        twins = _find_equivalents({name: entry for name, (entry, _) in entries.items()}, key)
        candidates = []
        for name, (entry, estimate) in entries.items():
            candidate = self.candidate(entry, estimate, is_baseline=name == key, limit=limit)
            if _without_sharding(entry.plan) == plain:
                candidate = replace(candidate, is_plain=True, fits_alone=self._fits_alone(entry, limit))
            if name in twins:
                candidate = self._same_as(candidate, entries[twins[name]][0])
            candidates.append(candidate)
        plans = [entry.plan for entry, _ in entries.values()]
        candidates = self._sort_candidates(self._with_batches(candidates, plans, limit))
        return candidates if key is not None else _mark_simplest(candidates)

    def _fits_alone(self, resolution: Resolved, limit: Limits) -> bool:
        # In one process, methods that need several fall away.
        context, estimate = replace(self._context, cluster=self._context.cluster.alone), None
        with contextlib.suppress(StrategyError):
            (estimate,) = context.estimates([context.resolve(resolution.strategy)])
        several = self._context.cluster.world_size > 1
        return several and estimate is not None and limit.admits(estimate.peak_bytes)

    def duplicates(self, templates: Templates) -> list[Candidate]:
        """Candidates that amount to another, for the report."""
        candidates = []
        for resolution, twin in templates.same[:MAX_SAME]:
            strategy = Strategy(steps_of(twin.chosen, twin.group.first))
            other = resolve(strategy, self._context.cluster, self._context.registry)
            candidates.append(self._same_as(self.candidate(resolution, None), other))
        return candidates

    def _same_as(self, candidate: Candidate, other: Resolved) -> Candidate:
        label = label_of(other.strategy.steps, leave_out=self._implied_methods(other))
        return replace(candidate, pruned=Pruned(kind="same", reason=f"amounts to {label} on this cluster"))

    def candidate(
        self,
        resolution: Resolved,
        estimate: Estimate | None,
        *,
        is_baseline: bool = False,
        limit: Limits | None = None,
    ) -> Candidate:
        """One strategy as a candidate, pruned if its predicted peak is beyond the limit."""
        steps = resolution.strategy.steps
        alone = [(item.method.name, item.method.plan(Plan(), item.config)) for item in resolution.chosen]
        # Each method alone on an empty plan tells whether it sets dtypes.
        dtypes = [name for name, plan in alone if plan.precision != Plan().precision]
        limit = limit or memory_limit(self._context.cluster, self._context.settings)
        verdict = None
        if estimate is not None and not limit.admits(estimate.peak_bytes):
            verdict = Pruned(kind="memory", reason=limit.refusal(estimate))
        return Candidate(
            key=key_of(steps),
            steps=tuple((step.name, step.config) for step in steps),
            label=label_of(steps, leave_out=self._implied_methods(resolution)),
            estimate=estimate,
            is_baseline=is_baseline,
            pruned=verdict,
            setup_seconds=_setup_seconds(resolution, self._context.cluster),
            refusal_keys=refusal_keys(resolution),
            axes=resolution.plan.axes,
            precision=label_of(step for step in steps if step.name in dtypes) if dtypes else "",
        )

    def _implied_methods(self, resolution: Resolved) -> list[str]:
        # A mesh of data ranks alone goes without saying in a label, unless nothing else would be left.
        explicit = [item for item in resolution.chosen if item.method.default_for is None]
        plain_mesh = resolution.plan.size("data") == self._context.cluster.world_size
        return [
            item.method.name
            for item in resolution.chosen
            if item.method.default_for == "mesh" and plain_mesh and (explicit or len(resolution.chosen) > 1)
        ]

    def _with_batches(self, candidates: list[Candidate], plans: list[Plan], limit: Limits) -> list[Candidate]:
        context, has_prices = self._context, all(each.estimate is not None for each in candidates)
        if context.settings.objective != "batch" or not has_prices:
            return candidates
        table = PlanTable.of(plans)
        largest = np.zeros(len(table), dtype=np.int64)
        peaks = np.zeros(len(table))
        for power in range(16):  # doubled up to 32,768 times, until nothing fits
            workload = replace(context.workload, global_batch=context.workload.global_batch << power)
            prices = price(table, context.profile, context.cluster, workload)
            fits = limit.admit(prices.peak_bytes)
            if power and limit.num_bytes:  # the given batch is tried where it may just fit; others must fit
                fits = prices.peak_bytes <= limit.num_bytes
            largest[fits] = workload.global_batch
            peaks[fits] = prices.peak_bytes[fits]
            if not fits.any():
                break
        batch = context.workload.global_batch
        return [
            replace(candidate, largest_batch=int(size), largest_batch_bytes=float(peak), given_batch=batch)
            for candidate, size, peak in zip(candidates, largest, peaks, strict=True)
        ]

    def _sort_candidates(self, candidates: list[Candidate]) -> list[Candidate]:
        def order(candidate: Candidate) -> tuple[Any, ...]:
            is_pruned, estimate = candidate.pruned is not None, candidate.estimate
            if estimate is None:
                return (is_pruned, 0.0, len(candidate.steps), candidate.key)
            figures = {"memory": estimate.peak_bytes, "batch": -float(candidate.largest_batch or 0)}
            first = figures.get(self._context.settings.objective, estimate.step_seconds)
            return (is_pruned, first, estimate.step_seconds, len(candidate.steps), candidate.key)

        return sorted(candidates, key=order)


def _without_sharding(plan: Plan) -> Plan:
    # Without precision and data parallelism, plain strategies are equal.
    axes = tuple((name, size) for name, size in plan.axes if name in MODEL_AXES and size > 1)
    free = ("rank_order", "gradient_sync", "precision", "sharding")
    return plan.changed(axes=axes, **{name: getattr(Plan(), name) for name in free})


def _find_equivalents(strategies: dict[str, Resolved], baseline: str | None) -> dict[str, str]:
    first: dict[Plan, str] = {}
    if baseline is not None:  # which is kept, whatever comes first
        first[canonical(strategies[baseline].plan)] = baseline
    twins = {}
    for name, strategy in strategies.items():
        first_name = first.setdefault(canonical(strategy.plan), name)
        if first_name != name:
            twins[name] = first_name  # they run alike
    return twins


def _mark_simplest(candidates: list[Candidate]) -> list[Candidate]:
    # Where the plain strategy may not be used, the simplest candidate is the baseline.
    free = [candidate for candidate in candidates if candidate.pruned is None] or candidates
    simplest = min(free, key=lambda candidate: len(candidate.steps))
    return [replace(candidate, is_baseline=candidate is simplest) for candidate in candidates]


def _setup_seconds(resolution: Resolved, cluster: Cluster) -> float:
    if not resolution.plan.compiled:
        return 0.0
    # Compilation by inductor took 20 to 60 seconds for a block on 2 CPU cores, about 20 on GPUs.
    return 40.0 if cluster.device_type == "cpu" else 20.0
