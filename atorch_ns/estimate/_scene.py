"""The setting in which the plans of one kind are priced: sizes, links and the device, as arrays over plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from atorch_ns.cluster import Cluster, Hardware
from atorch_ns.estimate._estimate import Workload
from atorch_ns.estimate._ring import Groups, groups_along
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan

__all__ = ["Scene"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """R plans of one kind on one cluster.

    Attributes:
        plan: what they have in common.
        sizes: [R] of each axis.
        order: the axes, innermost first.
        micro_batches: [R] passes of a step.
        num_samples: [R] samples in a micro-batch of one rank.
        num_tokens: in a sample.
        trace: of the model.
        cluster: with hardware.
    """

    plan: Plan
    sizes: dict[str, np.ndarray]
    order: tuple[str, ...]
    micro_batches: np.ndarray
    num_samples: np.ndarray
    num_tokens: int
    trace: Trace
    cluster: Cluster

    @classmethod
    def of(
        cls,
        plan: Plan,
        data: np.ndarray,
        zero: np.ndarray,
        micro_batches: np.ndarray,
        trace: Trace,
        cluster: Cluster,
        workload: Workload,
    ) -> Scene:
        """The setting of a template with R choices of sizes."""
        sizes = {name: np.full(len(data), size) for name, size in plan.axes}
        sizes |= {"data": data, "zero": zero}
        named = tuple(name for name, _ in plan.axes)
        return cls(
            plan=plan,
            sizes=sizes,
            order=(*named, *(name for name in ("data", "zero") if name not in named)),
            micro_batches=micro_batches,
            num_samples=workload.global_batch / (data * zero * micro_batches),
            num_tokens=workload.num_tokens,
            trace=trace,
            cluster=cluster,
        )

    @property
    def hardware(self) -> Hardware:
        """The cluster's."""
        assert self.cluster.hardware is not None
        return self.cluster.hardware

    def size(self, names: Iterable[str]) -> np.ndarray:
        """[R] product of the sizes of these axes."""
        product = np.ones(len(self.micro_batches), dtype=np.int64)
        for name in dict.fromkeys(names):
            product = product * self.sizes.get(name, 1)
        return product

    def groups(self, names: Iterable[str]) -> Groups:
        """The groups over these axes together; axes that are not neighbours are taken to be."""
        wanted = set(names)
        inner = np.ones(len(self.micro_batches), dtype=np.int64)
        for name in self.order:
            if name in wanted and np.any(self.sizes[name] > 1):
                break
            inner = inner * np.where(name in wanted, 1, self.sizes[name])
        return groups_along(inner, self.size(wanted), self.cluster)
