"""Plans as columns, so that many are priced by a few array operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atorch_ns.strategy import Plan

__all__ = ["PlanTable"]


@dataclass(frozen=True)
class PlanTable:
    """Many plans: a few that differ in kind, each with any number of sizes.

    Row ``i`` is the plan ``templates[template[i]]`` with its axes of the given sizes and its number of
    micro-batches. What differs in kind (precision, sharding, recomputation, …) is read off the templates
    once; what differs in size only is a column.

    Attributes:
        templates: plans that differ in kind.
        template: [N] index into ``templates``.
        data: [N] size of the axis ``data``.
        zero: [N] size of the axis ``zero``.
        micro_batches: [N] passes that one step's batch is split into.
    """

    templates: tuple[Plan, ...]
    template: np.ndarray
    data: np.ndarray
    zero: np.ndarray
    micro_batches: np.ndarray

    def __len__(self) -> int:
        return len(self.template)

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> PlanTable:
        """The table of these plans, in their order."""
        kinds: dict[Plan, int] = {}
        index = [kinds.setdefault(_kind(plan), len(kinds)) for plan in plans]
        return cls(
            tuple(kinds),
            np.asarray(index, dtype=np.int64),
            np.asarray([plan.size("data") for plan in plans], dtype=np.int64),
            np.asarray([plan.size("zero") for plan in plans], dtype=np.int64),
            np.asarray([plan.num_micro_batches for plan in plans], dtype=np.int64),
        )

    @classmethod
    def product(
        cls, templates: Iterable[Plan], meshes: Sequence[tuple[int, int]], micro_batches: Sequence[int]
    ) -> PlanTable:
        """Every template on every mesh, ``(data, zero)``, with every number of micro-batches."""
        kinds = tuple(dict.fromkeys(_kind(plan) for plan in templates))
        grid = np.meshgrid(np.arange(len(kinds)), np.arange(len(meshes)), micro_batches, indexing="ij")
        template, mesh, passes = (axis.ravel() for axis in grid)
        sizes = np.asarray(meshes, dtype=np.int64).reshape(-1, 2)
        return cls(kinds, template, sizes[mesh, 0], sizes[mesh, 1], passes.astype(np.int64))

    def plan(self, row: int) -> Plan:
        """The plan of a row."""
        sizes = {"data": int(self.data[row]), "zero": int(self.zero[row])}
        template = self.templates[self.template[row]]
        axes = tuple((name, sizes.get(name, size)) for name, size in template.axes)
        axes += tuple((name, size) for name, size in sizes.items() if size > 1 and name not in dict(axes))
        plan: Plan = replace(template, axes=axes, num_micro_batches=int(self.micro_batches[row]))
        return plan


def _kind(plan: Plan) -> Plan:
    axes = tuple((name, 0 if name in ("data", "zero") else size) for name, size in plan.axes)
    kind: Plan = replace(plan, axes=axes, num_micro_batches=1)
    return kind
