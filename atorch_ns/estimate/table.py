"""PlanTable: plans in columns, for vectorised pricing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from atorch_ns.estimate.estimate import Workload
from atorch_ns.estimate.model_shard import AxisUses, Memo, Sizes
from atorch_ns.estimate.stages import usual_micro_batches
from atorch_ns.strategy import MODEL_AXES, AxisUse, Plan


@dataclass(frozen=True)
class PlanTable:
    """Many plans: a few that differ in kind, each with any number of sizes.

    Row ``i`` is the plan ``templates[template[i]]`` with its axes of the given sizes and its number of
    micro-batches. Differences in kind (precision, sharding, recomputation, …) are read off the templates
    once. Differences in size are columns.

    Attributes:
        templates: plans that differ in kind.
        template: [N] index into ``templates``.
        data: [N] size of the axis ``data``.
        zero: [N] size of the axis ``zero``.
        micro_batches: [N] passes that one step's batch is split into.
        model: [N, 4] sizes of the axes that divide the model, as :data:`~atorch_ns.strategy.MODEL_AXES` has
            them.
        use: [N] index into ``uses``.
        uses: how the axes that divide the model are used.
    """

    templates: tuple[Plan, ...]
    template: np.ndarray
    data: np.ndarray
    zero: np.ndarray
    micro_batches: np.ndarray
    model: np.ndarray
    use: np.ndarray
    uses: tuple[AxisUse, ...]

    def __len__(self) -> int:
        return len(self.template)

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> PlanTable:
        """The table of these plans, in their order."""
        kinds: dict[Plan, int] = {}
        uses: dict[AxisUse, int] = {}
        # The use of axes is a column, so templates have the default one: fewer kinds, longer arrays.
        index = [kinds.setdefault(AxisUse().onto(template_of(plan)), len(kinds)) for plan in plans]
        use = [uses.setdefault(AxisUse.of(plan), len(uses)) for plan in plans]
        return cls(
            tuple(kinds),
            np.asarray(index, dtype=np.int64),
            np.asarray([plan.size("data") for plan in plans], dtype=np.int64),
            np.asarray([plan.size("zero") for plan in plans], dtype=np.int64),
            np.asarray([plan.num_micro_batches for plan in plans], dtype=np.int64),
            np.asarray([[plan.size(name) for name in MODEL_AXES] for plan in plans], dtype=np.int64),
            np.asarray(use, dtype=np.int64),
            tuple(uses),
        )

    def reducing_each(self, rows: np.ndarray | None = None) -> PlanTable:
        """The table with gradients reduced after every micro-batch, in the rows of a mask or in all."""
        rows = np.ones(len(self), dtype=bool) if rows is None else rows
        indices, template = {plan: index for index, plan in enumerate(self.templates)}, self.template.copy()
        for index in np.unique(template[rows]).tolist():
            plan = self.templates[index].changed(sharding={"reduces_each": True})
            template[rows & (self.template == index)] = indices.setdefault(plan, len(indices))
        return replace(self, templates=tuple(indices), template=template)

    def take(self, rows: np.ndarray) -> PlanTable:
        """The table of some rows."""
        names = ("template", "data", "zero", "micro_batches", "model", "use")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def sizes(self, index: int, workload: Workload, memo: Memo) -> tuple[np.ndarray, Sizes]:
        """The rows of a template, and their sizes; the same object for equal ones.

        A pipeline for which no micro-batches are given runs as many as :func:`usual_micro_batches`.
        """
        rows = np.flatnonzero(self.template == index)
        model, passes, use = self.model[rows], self.micro_batches[rows], self.use[rows]
        pipeline, expert = (model[:, MODEL_AXES.index(name)] for name in ("pipeline", "expert"))
        # One micro-batch in a pipeline means that none were given.
        for row in np.flatnonzero((pipeline > 1) & (passes == 1)).tolist():
            ranks = self.data[rows[row]] * self.zero[rows[row]] * expert[row]
            num_samples = workload.global_batch // int(ranks)
            passes = passes.copy()
            passes[row] = usual_micro_batches(self.uses[use[row]].pipeline, int(pipeline[row]), num_samples)
        # Templates with equal rows share one Sizes, by whose identity other results are kept in the memo.
        columns = np.column_stack([self.data[rows], self.zero[rows], passes, use, model])
        key = ("sizes", self._axis_uses, columns.shape, columns.tobytes())
        return rows, memo.get(key, lambda: _build_sizes(columns, self._axis_uses))

    @cached_property
    def _axis_uses(self) -> AxisUses:
        return AxisUses(self.uses)

    def plan(self, row: int) -> Plan:
        """The plan of a row."""
        sizes = {"data": int(self.data[row]), "zero": int(self.zero[row])}
        sizes |= {name: int(size) for name, size in zip(MODEL_AXES, self.model[row], strict=True)}
        template = self.uses[self.use[row]].onto(self.templates[self.template[row]])
        # The template's axes keep their order, innermost first; others follow where they have ranks.
        axes = tuple((name, sizes[name]) for name, _ in template.axes if name in sizes)
        axes += tuple((name, size) for name, size in sizes.items() if size > 1 and name not in dict(axes))
        plan: Plan = replace(template, axes=axes, num_micro_batches=int(self.micro_batches[row]))
        return _shard_over_axes(plan, plan.unit_axes if plan.sharding.layout == "rows" else plan.shard_axes)


def with_chosen_reductions(table: PlanTable, num_trainable: int, memory_bytes: float) -> PlanTable:
    """The table with gradients reduced after every micro-batch, in rows that leave this open and for which
    :meth:`~atorch_ns.strategy.Plan.reduces_each` says so."""
    mask = np.zeros(len(table), dtype=bool)
    tensor = table.model[:, MODEL_AXES.index("tensor")]
    for index, plan in enumerate(table.templates):
        if plan.sharding.reduces_each is None:
            # The decision depends on no other axis but ``pipeline``, and pricing ignores it in pipelines.
            for size in np.unique(tensor[table.template == index]).tolist():
                if replace(plan, axes=(("tensor", size),)).reduces_each(num_trainable, memory_bytes):
                    mask |= (table.template == index) & (tensor == size)
    return table.reducing_each(mask)


def _build_sizes(columns: np.ndarray, uses: AxisUses) -> Sizes:
    data, zero, micro_batches, use, *model = columns.T
    axes = dict(zip(MODEL_AXES, model, strict=True))
    return Sizes(data=data, zero=zero, micro_batches=micro_batches, use=use, uses=uses, **axes)


def template_of(plan: Plan, **changes: Any) -> Plan:
    """Returns the common part of a table's rows: the plan without its sizes, with ``changes`` applied.

    Sharded states are divided over :meth:`Sizes.shards` ranks, whatever axes the template was made for.
    """
    changes = {"axes": tuple((name, 0) for name, _ in plan.axes), "num_micro_batches": 1, **changes}
    return _shard_over_axes(plan, ("data",), **changes)


def _shard_over_axes(plan: Plan, over: tuple[str, ...], **changes: Any) -> Plan:
    names = ("parameters_over", "gradients_over", "optimizer_over")
    axes = {name: over if getattr(plan.sharding, name) else () for name in names}
    return plan.changed(**changes, sharding=axes)
