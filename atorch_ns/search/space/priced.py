"""Priced rows: every template on every mesh with every number of micro-batches, as arrays."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import Estimate, PlanTable, Prices, Workload, price, template_of
from atorch_ns.method import Chosen, FollowsPlan, fold_plan
from atorch_ns.pipeline import get_schedule
from atorch_ns.profile import Profile, Trace
from atorch_ns.search.space.templates import Choices, MeshGroup, Template, Templates, axes_of, steps_of
from atorch_ns.strategy import MODEL_AXES, AxisSize, AxisUse, Plan

# Most micro-batches for each rank of a pipeline: with so many, a fifth of a step is bubble, and more would be
# too small each.
PER_STAGE = 4

_ORDER = ("tensor", "sequence", "expert", "zero", "data", "pipeline")  # axes of meshes, from the inside out
_USUAL = AxisUse()


@dataclass(frozen=True)
class AxisOption:
    """One option for the axes of a mesh that divide the model.

    Attributes:
        chosen: the methods that use the axes otherwise than by default.
        plan: settings of the plan that these methods decide.
        axes: the axes that they use.
    """

    chosen: tuple[Chosen, ...] = ()
    plan: AxisUse = _USUAL
    axes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PricedRows:
    """Strategies as rows.

    Attributes:
        templates: combinations of methods.
        template: [N] index into ``templates``.
        shapes: [N, 6] sizes of the axes, as :data:`~atorch_ns.search.space.templates.Shape` has them.
        micro_batches: [N] numbers of micro-batches.
        prices: prices of the rows; ``None`` where nothing could be priced.
        peak_bytes, step_seconds: [N] predictions; all 0 where nothing could be priced.
        splitters: the method that splits the batch, by number of micro-batches.
        option: [N] index into ``options``.
        options: options for the axes that divide the model.
        reduces_each: [N] whether gradients are reduced after every micro-batch, since whole ones do not fit.
    """

    templates: tuple[Template, ...]
    template: np.ndarray
    shapes: np.ndarray
    micro_batches: np.ndarray
    prices: Prices | None
    peak_bytes: np.ndarray
    step_seconds: np.ndarray
    splitters: dict[int, Chosen | None]
    option: np.ndarray
    options: tuple[AxisOption, ...]
    reduces_each: np.ndarray

    def __len__(self) -> int:
        return len(self.template)

    def estimate(self, row: int) -> Estimate | None:
        """What a row is predicted to cost; ``None`` where nothing could be priced."""
        return None if self.prices is None else self.prices.estimate(row)

    def steps(self, row: int) -> list[tuple[str, object]]:
        """The entries of a row's strategy."""
        template = self.templates[self.template[row]]
        mesh = template.group.meshes[tuple(self.shapes[row].tolist())]
        chosen = (*self.options[self.option[row]].chosen, *template.chosen)
        if self.reduces_each[row]:  # the choice of the pricing becomes a setting of the strategy
            plan = template.plan.changed(sharding={"reduces_each": True})
            chosen = tuple(_follow_plan(item, plan) for item in chosen)
        return steps_of(chosen, mesh, self.splitters[int(self.micro_batches[row])])


def price_rows(
    template_set: Templates,
    choices: Choices,
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
    max_micro_batches: int,
    limit_bytes: int = 0,
) -> PricedRows:
    """All rows, priced where there are a trace and hardware figures.

    Where a template leaves it open, gradients are reduced after every micro-batch in rows that take more than
    ``limit_bytes`` with whole ones; 0 for no limit. Only rows whose ranks and micro-batches divide the batch are
    made, which may be none. The number of micro-batches goes up to ``max_micro_batches``; one that the user
    fixed may be larger.
    """
    templates = template_set.distinct
    options = axis_options(choices)
    rows = _Rows(choices, options, profile, workload, max_micro_batches, cluster.local_world_size)
    columns = [rows.of(index, entry) for index, entry in enumerate(templates)]
    template, shapes, option, counts = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    peak, seconds = np.zeros(len(template)), np.zeros(len(template))
    prices, reduces_each = None, np.zeros(len(template), dtype=bool)
    if len(template) and profile.trace is not None and cluster.hardware is not None:
        kinds = _Kinds.of(templates, options, profile.trace)
        table = PlanTable(
            kinds.plans,
            kinds.template[template],
            shapes[:, 0],
            shapes[:, 1],
            counts,
            shapes[:, 2:],
            kinds.use[template, option],
            kinds.uses,
        )
        prices = price(table, profile, cluster, workload)
        # Too large with whole gradients, open rows are priced anew with a reduction after every micro-batch.
        too_large = _open_reductions(table) & (prices.peak_bytes > limit_bytes)
        if limit_bytes and too_large.any():
            again = price(table.take(too_large).reducing_each(), profile, cluster, workload)
            reduces_each[too_large] = again.peak_bytes < prices.peak_bytes[too_large]
            prices = prices.replaced(too_large, again)
        peak, seconds = prices.peak_bytes, prices.step_seconds
    splitters = choices.micro_batches
    return PricedRows(
        templates, template, shapes, counts, prices, peak, seconds, splitters, option, options, reduces_each
    )


def _open_reductions(table: PlanTable) -> np.ndarray:
    is_open = np.asarray([plan.sharding.reduces_each is None for plan in table.templates], dtype=bool)
    is_whole = table.model[:, MODEL_AXES.index("pipeline")] == 1  # a pipeline reduces once a step
    return np.asarray(is_open[table.template] & is_whole & (table.micro_batches > 1))  # [N]


def _follow_plan(item: Chosen, plan: Plan) -> Chosen:
    if not isinstance(item.method, FollowsPlan):
        return item
    return replace(item, config=item.method.following(item.config, plan))


def batch_divisors(
    template_set: Templates, choices: Choices, profile: Profile, workload: Workload, max_micro_batches: int
) -> list[int]:
    """The numbers of equal parts that some row divides a global batch into: data-parallel ranks times micro-batches."""
    anything = replace(workload, global_batch=0)  # which every number divides
    rows = _Rows(choices, axis_options(choices), profile, anything, max_micro_batches, per_node=0)
    columns = (rows.of(index, template) for index, template in enumerate(template_set.distinct))
    products = (_data_ranks(shapes) * counts for _, shapes, _, counts in columns)
    return sorted({number for product in products for number in product.tolist()})


@dataclass(frozen=True)
class _Kinds:
    """Kinds of templates with the same price: those whose axes are in one order differ in sizes only."""

    plans: tuple[Plan, ...]  # the kinds, without fields that no price depends on
    template: np.ndarray  # [templates] index into ``plans``
    uses: tuple[AxisUse, ...]  # distinct settings of the axes
    use: np.ndarray  # [templates, options] index into ``uses``

    @classmethod
    def of(cls, templates: tuple[Template, ...], options: tuple[AxisOption, ...], trace: Trace) -> _Kinds:
        kinds: dict[Plan, int] = {}
        uses: dict[AxisUse, int] = {}
        index, use = [], []
        rows: dict[AxisUse, list[int]] = {}  # few templates set something of axes themselves
        # No price depends on these fields of a template. Replaced modules were traced in some models only.
        alike: dict[str, Any] = _USUAL._asdict()
        if not any(segment.replaced_costs for segment in trace.segments):
            alike["replaced"] = False
        for template in templates:
            kind = template_of(template.plan, axes=_template_axes(template.plan.axes), **alike)
            index.append(kinds.setdefault(kind, len(kinds)))
            axis_use = AxisUse.of(template.plan)
            if axis_use not in rows:
                rows[axis_use] = [uses.setdefault(each.plan.over(axis_use), len(uses)) for each in options]
            use.append(rows[axis_use])
        return cls(
            tuple(kinds), np.asarray(index, dtype=np.int64), tuple(uses), np.asarray(use, dtype=np.int64)
        )


@cache
def _template_axes(axes: tuple[AxisSize, ...]) -> tuple[AxisSize, ...]:
    # Meshes whose axes are in the usual order are one kind, with all axes; a size of 1 is as good as none.
    places = [_ORDER.index(name) for name, _ in axes if name in _ORDER]
    usual = len(places) == len(axes) and places == sorted(places)
    return tuple((name, 0) for name in (_ORDER if usual else dict(axes)))


@dataclass(frozen=True)
class _Rows:
    """Makes the rows of templates."""

    choices: Choices  # the alternatives of every method
    options: tuple[AxisOption, ...]  # for the axes that divide the model
    profile: Profile
    workload: Workload
    max_micro_batches: int  # the most without a pipeline
    per_node: int  # ranks of a node; 0 for any number
    # Columns by group of meshes and setting of the axes; options by group and settings of the template; axes
    # by identity of the choice.
    known: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    possible: dict[tuple[object, ...], list[tuple[int, AxisUse]]] = field(default_factory=dict)
    axes: dict[int, frozenset[str]] = field(default_factory=dict)

    def of(self, index: int, template: Template) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Columns of one template: [n] its index, [n, 6] shapes, [n] options and [n] numbers of micro-batches."""
        axis_use = AxisUse.of(template.plan)
        filled = self._used_axes(template.chosen)
        none = np.zeros(0, int)
        parts = [(np.zeros((0, 2 + len(MODEL_AXES)), int), none, none)]
        for position, use in self._find_uses(template.group, axis_use, filled):
            if (
                template.plan.whole_backward
                and _splits_backward(use.pipeline.schedule)
                and template.group.has("pipeline")
            ):
                continue  # compiled blocks compute both parts of a backward pass at once
            if use.tensor.asynchronous and template.plan.compiler != "inductor":
                continue  # inductor alone joins products with their exchanges
            shapes, counts = self._cached_columns(template.group, use)
            parts.append((shapes, np.full(len(counts), position), counts))
        shapes, option, counts = (np.concatenate(each) for each in zip(*parts, strict=True))
        return np.full(len(counts), index), shapes, option, counts

    def _used_axes(self, chosen: tuple[Chosen, ...]) -> frozenset[str]:
        for item in chosen:
            if id(item) not in self.axes:
                self.axes[id(item)] = frozenset(axes_of(item))
        return frozenset().union(*(self.axes[id(item)] for item in chosen))

    def _find_uses(self, group: MeshGroup, use: AxisUse, filled: frozenset[str]) -> list[tuple[int, AxisUse]]:
        key = (id(group), use, filled)
        if key not in self.possible:
            self.possible[key] = [
                (index, option.plan.over(use))  # settings of the template come first
                for index, option in enumerate(self.options)
                if not option.axes & filled and all(group.has(axis) for axis in option.axes)
            ]
        return self.possible[key]  # the index of each option, and the setting of the axes that results

    def _cached_columns(self, group: MeshGroup, use: AxisUse) -> tuple[np.ndarray, np.ndarray]:
        key = (id(group), use)
        if key not in self.known:
            self.known[key] = self._compute_columns(group, use)
        return self.known[key]

    def _compute_columns(self, group: MeshGroup, use: AxisUse) -> tuple[np.ndarray, np.ndarray]:
        counts, most = self._allowed_micro_batches
        meshes = np.asarray(list(group.meshes), dtype=np.int64)  # [M, 6]
        shapes = np.repeat(meshes, len(counts), axis=0)  # every mesh with every number of micro-batches
        micro_batches = np.tile(counts, len(meshes))
        kept = self.workload.global_batch % (_data_ranks(shapes) * micro_batches) == 0
        pipeline = shapes[:, 2 + MODEL_AXES.index("pipeline")]
        # A pipeline may have more micro-batches than the limit: its bubble shrinks with their number.
        kept &= micro_batches <= np.maximum(most, PER_STAGE * pipeline * (pipeline > 1))
        if group.has("pipeline"):
            kept &= _can_run(use, pipeline, micro_batches, len(self.profile.blocks))
            # With one micro-batch a pipeline takes its usual number, which is among the others.
            if len(self.choices.micro_batches) > 1:
                kept &= micro_batches > 1
        if use.tensor.asynchronous:  # along the innermost axis, between the devices of a node
            kept &= self.per_node % shapes[:, 2 + MODEL_AXES.index("tensor")] == 0
        # Ulysses gives each rank whole heads.
        if group.has("sequence") and use.sequence.exchange == "ulysses" and self.profile.trace is not None:
            sizes = shapes[:, [2 + MODEL_AXES.index(name) for name in ("tensor", "sequence")]].prod(axis=1)
            kept &= _divides_heads(self.profile.trace, sizes)
        return shapes[kept], micro_batches[kept]  # [n, 6], [n]

    @cached_property
    def _allowed_micro_batches(self) -> tuple[np.ndarray, int]:
        counts = np.asarray(sorted(self.choices.micro_batches), dtype=np.int64)
        counts = counts[self.workload.global_batch % counts == 0]
        fixed = 1 not in self.choices.micro_batches  # the user's number, which may exceed the limit
        return counts, int(counts.max(initial=1)) if fixed else self.max_micro_batches


def _data_ranks(shapes: np.ndarray) -> np.ndarray:
    product: np.ndarray = shapes[:, 0] * shapes[:, 1] * shapes[:, 2 + MODEL_AXES.index("expert")]
    return product  # [n] of [n, 6] shapes: ranks along ``expert`` see different data, too


def axis_options(choices: Choices) -> tuple[AxisOption, ...]:
    """Every option for the axes that divide the model, the default first."""
    options = []
    for items in itertools.product(*choices.options.values()):  # ``None`` first, for the default
        chosen = tuple(item for item in items if item is not None)
        axes = frozenset(axis for item in chosen for axis in axes_of(item))
        options.append(AxisOption(chosen, AxisUse.of(fold_plan(chosen)), axes))
    return tuple(options)


@cache
def _splits_backward(schedule: str) -> bool:
    return schedule != "auto" and get_schedule(schedule).splits_backward


def _can_run(use: AxisUse, pipeline: np.ndarray, micro_batches: np.ndarray, pieces: int) -> np.ndarray:
    # 1F1B, which runs any number of micro-batches, stands for a schedule that is chosen later.
    info = get_schedule("1F1B" if use.pipeline.schedule == "auto" else use.pipeline.schedule)
    stages = use.pipeline.stages_per_rank or info.usual_stages
    pairs = zip(pipeline.tolist(), micro_batches.tolist(), strict=True)
    return np.asarray(
        [ranks * stages <= pieces and not info.problem(ranks, count, stages) for ranks, count in pairs],
        dtype=bool,
    )


def _divides_heads(trace: Trace, sizes: np.ndarray) -> np.ndarray:
    heads = {trace.num_heads, trace.num_key_value_heads}  # 0 where unknown, which everything divides
    heads |= {count for segment in trace.segments for count in segment.heads}
    return np.asarray([all(count % size == 0 for count in heads) for size in sizes.tolist()], dtype=bool)
