"""Pricing context: sizes, links and the device of the plans of one kind, as arrays over plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atorch_ns.cluster import Cluster, Hardware
from atorch_ns.costs.collectives import Groups, groups_along
from atorch_ns.estimate.estimate import Workload
from atorch_ns.estimate.model_shard import Memo, ModelShard, ShardUnit, Sizes, cost_of, units_of
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan

DATA_AXES = ("data", "zero", "expert")
"""Axes whose ranks see different data."""

INNERMOST_FIRST = ("tensor", "sequence", "expert", "zero", "data", "pipeline")
"""The order of axes that a plan does not name: those that communicate most are nearest."""


@dataclass(frozen=True, kw_only=True)
class PricingContext:
    """R plans of one kind on one cluster.

    Attributes:
        plan: the plan that they have in common.
        sizes: axis sizes and micro-batches of a step.
        parts: part of the model on the priced rank: in a pipeline, the slowest.
        num_tokens: tokens in a sample.
        global_batch: samples of a step.
        cluster: the cluster, with hardware figures.
        memo: values of this pricing that were found before.
    """

    plan: Plan
    sizes: Sizes
    parts: ModelShard
    num_tokens: int
    global_batch: int
    cluster: Cluster
    memo: Memo

    @classmethod
    def of(
        cls, plan: Plan, sizes: Sizes, trace: Trace, *, cluster: Cluster, workload: Workload, memo: Memo
    ) -> PricingContext:
        """The setting of a template with R choices of sizes; every rank has a part of every block."""
        return cls(
            plan=plan,
            sizes=sizes,
            parts=memo.get(("whole", sizes), lambda: ModelShard.whole(trace, sizes)),
            num_tokens=workload.num_tokens,
            global_batch=workload.global_batch,
            cluster=cluster,
            memo=memo,
        )

    @property
    def trace(self) -> Trace:
        """The trace of the model."""
        return self.parts.trace

    @property
    def micro_batches(self) -> np.ndarray:
        """[R] passes of a step."""
        return self.sizes.micro_batches

    @cached_property
    def num_samples(self) -> np.ndarray:
        """[R] samples in a micro-batch of one rank."""
        return self.sizes.num_samples(self.global_batch)

    @property
    def hardware(self) -> Hardware:
        """Hardware figures of the cluster."""
        assert self.cluster.hardware is not None
        return self.cluster.hardware

    @cached_property
    def units(self) -> tuple[ShardUnit, ...]:
        """The units of parameters that are gathered together."""
        return units_of(self.plan, self.trace)

    def shards(self, over: tuple[str, ...]) -> np.ndarray:
        """[R] ranks that states are divided over; 1 where ``over`` names no axis."""
        if not over:
            return np.ones(len(self.sizes), dtype=np.int64)
        return self.sizes.shards(self.plan.sharding.layout)

    @cached_property
    def shard_groups(self) -> Groups:
        """The ranks that states are divided over, as :meth:`Sizes.shards` counts them."""
        layout = self.plan.sharding.layout
        more = ("sequence",) if layout == "rows" else ()
        data_axes = ("data",) if layout == "parameters" else ("data", "expert")
        return self._choose_groups(self.groups(("zero", *more)), self.groups((*data_axes, *more)))

    @cached_property
    def replica_groups(self) -> Groups:
        """The ranks that have the same share of the states."""
        return self._choose_groups(self.groups(("data", "expert")), self.groups(("zero",)))

    @cached_property
    def data_groups(self) -> Groups:
        """The ranks that see different data."""
        return self.groups(DATA_AXES)

    def _choose_groups(self, with_zero: Groups, without: Groups) -> Groups:
        has = self.sizes.zero > 1  # states are then divided over ``zero`` alone
        return Groups(
            np.where(has, with_zero.size, without.size), np.where(has, with_zero.within, without.within)
        )

    def count(self, unit: ShardUnit) -> np.ndarray | int:
        """[R] number of instances of a unit on the rank."""
        return 1 if unit.is_root else self.parts.counts[unit.segment]

    def share_of(self, unit: ShardUnit) -> np.ndarray | float:
        """[R] share of one unit's parameters on the rank, before data parallelism divides them."""
        if not self.parts.divides:
            return 1.0
        if not unit.is_root:
            return self.parts.of_parameters(unit.segment)
        # The root has the parameters of no other unit: its share is their mean, weighted by elements.
        unit_segments = {member.segment for member in self.units}
        total, local = 0, np.zeros(len(self.sizes))
        for s, segment in enumerate(self.trace.segments):
            elements = sum(spec.num_elements for spec in segment.parameters if spec.tied_to is None)
            if s not in unit_segments and elements:
                total += elements * segment.count
                local = local + elements * self.parts.of_parameters(s) * self.parts.counts[s]
        return local / total if total else 1.0

    def output_bytes(self, s: int) -> np.ndarray:
        """[R] bytes of one micro-batch's output of one block of segment ``s``, on the rank."""
        output = cost_of(self.plan, self.trace.segments[s]).output
        whole = np.asarray(output.at(self.num_samples, self.num_tokens), dtype=float)
        return np.asarray(whole * self.parts.share(s, output.divided, output.words))

    def elements(self, *, trainable: bool) -> np.ndarray | float:
        """[R] elements of parameters on the rank, before data parallelism divides them."""
        return sum(
            sum(p.num_elements for p in unit.parameters if p.trainable or not trainable)
            * self.share_of(unit)
            * self.count(unit)
            for unit in self.units
        )

    def size(self, names: Iterable[str]) -> np.ndarray:
        """[R] product of the sizes of these axes."""
        product = np.ones(len(self.sizes), dtype=np.int64)
        for name in dict.fromkeys(names):
            product = product * getattr(self.sizes, name)
        return product

    def groups(self, names: Iterable[str]) -> Groups:
        """The groups over these axes together; axes that are not neighbours are taken to be."""
        axes = frozenset(names)
        return self.memo.get(("groups", axes, self.order, self.sizes), lambda: self._build_groups(axes))

    def _build_groups(self, axes: frozenset[str]) -> Groups:
        # Ranks inside the first wanted axis: the distance between neighbours of a group, in rank numbers.
        inner = np.ones(len(self.sizes), dtype=np.int64)
        for name in self.order:
            size = getattr(self.sizes, name)
            if name in axes and np.any(size > 1):
                break
            inner = inner * np.where(name in axes, 1, size)
        return groups_along(inner, self.size(axes), self.cluster)

    @property
    def order(self) -> tuple[str, ...]:
        """The axes, innermost first: as the plan has them, then those that it does not name."""
        names = tuple(name for name, _ in self.plan.axes)
        return (*names, *(name for name in INNERMOST_FIRST if name not in names))
