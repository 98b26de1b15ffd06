"""Priced rows: every template on every mesh with every number of micro-batches, as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

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

_BATCH_AXES = ("data", "zero")  # the first of a shape, which divide the batch
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
    splitters: dict[int, Chosen | None]
    option: np.ndarray
    options: tuple[AxisOption, ...]
    reduces_each: np.ndarray

    def __len__(self) -> int:
        return len(self.template)

    @cached_property
    def peak_bytes(self) -> np.ndarray:
        """[N] predictions; all 0 where nothing could be priced."""
        return np.zeros(len(self)) if self.prices is None else self.prices.peak_bytes

    @cached_property
    def step_seconds(self) -> np.ndarray:
        """[N] predictions; all 0 where nothing could be priced."""
        return np.zeros(len(self)) if self.prices is None else self.prices.step_seconds

    def estimate(self, row: int) -> Estimate | None:
        """Returns the predicted cost of a row; ``None`` if nothing could be priced."""
        return None if self.prices is None else self.prices.estimate(row)

    def steps(self, row: int) -> list[tuple[str, object]]:
        """The entries of a row's strategy."""
        template = self.templates[self.template[row]]
        mesh = template.group.meshes[tuple(self.shapes[row].tolist())]
        methods = (*self.options[self.option[row]].chosen, *template.chosen)
        if self.reduces_each[row]:  # the choice of the pricing becomes a setting of the strategy
            plan = template.plan.changed(sharding={"reduces_each": True})
            methods = tuple(_follow_plan(item, plan) for item in methods)
        return steps_of(methods, mesh, self.splitters[int(self.micro_batches[row])])


def price_rows(
    template_set: Templates,
    choices: Choices,
    profile: Profile,
    cluster: Cluster,
    *,
    workload: Workload,
    max_micro_batches: int,
    limit_bytes: int = 0,
) -> PricedRows:
    """Returns all rows, priced if there are a trace and hardware figures.

    Where a template leaves it open, gradients are reduced after every micro-batch in rows that take more than
    ``limit_bytes`` with whole ones; 0 for no limit. Only rows whose ranks and micro-batches divide the batch
    are made: maybe none. A row has ``max_micro_batches`` at most, unless the user fixed
    a larger number or a pipeline needs more.
    """
    templates, options = template_set.distinct, axis_options(choices)
    maker = _RowMaker(choices, options, profile, workload, max_micro_batches, cluster.local_world_size)
    rows = _Rows.joined(maker.rows_of(index, template) for index, template in enumerate(templates))
    prices, reduces_each = None, np.zeros(len(rows.template), dtype=bool)
    if len(rows.template) and profile.trace is not None and cluster.hardware is not None:
        table = _make_table(rows, _Kinds.of(templates, options, profile.trace))
        price_table = partial(price, profile=profile, cluster=cluster, workload=workload)
        prices = price_table(table)
        if limit_bytes:
            prices, reduces_each = _reduce_where_too_large(table, prices, limit_bytes, price_table)
    of_rows: dict[str, Any] = {**rows._asdict(), "prices": prices, "reduces_each": reduces_each}
    return PricedRows(**of_rows, templates=templates, options=options, splitters=choices.micro_batches)


def _make_table(rows: _Rows, kinds: _Kinds) -> PlanTable:
    return PlanTable(
        templates=kinds.plans,
        template=kinds.template[rows.template],
        data=_sizes_along("data", rows.shapes),
        zero=_sizes_along("zero", rows.shapes),
        micro_batches=rows.micro_batches,
        model=rows.shapes[:, len(_BATCH_AXES) :],
        use=kinds.use[rows.template, rows.option],
        uses=kinds.uses,
    )


def _reduce_where_too_large(
    table: PlanTable, prices: Prices, limit_bytes: int, price_table: Callable[[PlanTable], Prices]
) -> tuple[Prices, np.ndarray]:
    # Open rows that are too large with whole gradients reduce each micro-batch's, where that is smaller.
    too_large = _open_reductions(table) & (prices.peak_bytes > limit_bytes)
    reduces_each = np.zeros(len(table), dtype=bool)
    if too_large.any():
        again = price_table(table.take(too_large).reducing_each())
        is_smaller = again.peak_bytes < prices.peak_bytes[too_large]
        reduces_each[too_large] = is_smaller
        prices = prices.replaced(reduces_each, again, is_smaller)
    return prices, reduces_each  # [N] whether gradients are reduced after every micro-batch


def _open_reductions(table: PlanTable) -> np.ndarray:
    is_open = np.asarray([plan.sharding.reduces_each is None for plan in table.templates], dtype=bool)
    is_whole = table.model[:, MODEL_AXES.index("pipeline")] == 1  # a pipeline reduces once a step
    return np.asarray(is_open[table.template] & is_whole & (table.micro_batches > 1))  # [N]


def _follow_plan(item: Chosen, plan: Plan) -> Chosen:
    if not isinstance(item.method, FollowsPlan):
        return item
    return replace(item, config=item.method.following(item.config, plan))


def batch_divisors(
    template_set: Templates, choices: Choices, profile: Profile, workload: Workload, *, max_micro_batches: int
) -> list[int]:
    """Numbers of equal parts into which rows divide a global batch: data ranks times micro-batches."""
    anything = replace(workload, global_batch=0)  # which every number divides
    maker = _RowMaker(choices, axis_options(choices), profile, anything, max_micro_batches, per_node=0)
    rows = _Rows.joined(maker.rows_of(index, entry) for index, entry in enumerate(template_set.distinct))
    return sorted({*(_data_ranks(rows.shapes) * rows.micro_batches).tolist()})


@dataclass(frozen=True)
class _Kinds:
    # Templates of a kind differ in sizes only, so they have one price at equal sizes.
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


class _Rows(NamedTuple):
    # Strategies without prices, as arrays of equal length.
    template: np.ndarray  # [n] index of the template
    shapes: np.ndarray  # [n, 6] sizes of the axes
    option: np.ndarray  # [n] index of the option for the axes that divide the model
    micro_batches: np.ndarray  # [n] numbers of micro-batches

    @classmethod
    def joined(cls, parts: Iterable[_Rows]) -> _Rows:
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


@dataclass(frozen=True)
class _RowMaker:
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

    def rows_of(self, index: int, template: Template) -> _Rows:
        # The rows of one template, whose index is given: maybe none.
        none = np.zeros(0, int)
        parts = [_Rows(none, np.zeros((0, len(_BATCH_AXES) + len(MODEL_AXES)), int), none, none)]
        used_axes = self._used_axes(template.chosen)
        for option, use in self._find_uses(template.group, AxisUse.of(template.plan), used_axes):
            if _fits_compiler(template, use):
                shapes, counts = self._cached_columns(template.group, use)
                parts.append(_Rows(np.full(len(counts), index), shapes, np.full(len(counts), option), counts))
        return _Rows.joined(parts)

    def _used_axes(self, methods: tuple[Chosen, ...]) -> frozenset[str]:
        for item in methods:
            if id(item) not in self.axes:
                self.axes[id(item)] = frozenset(axes_of(item))
        return frozenset().union(*(self.axes[id(item)] for item in methods))

    def _find_uses(self, group: MeshGroup, use: AxisUse, axes: frozenset[str]) -> list[tuple[int, AxisUse]]:
        key = (id(group), use, axes)
        if key not in self.possible:
            self.possible[key] = [
                (index, option.plan.over(use))  # settings of the template come first
                for index, option in enumerate(self.options)
                if not option.axes & axes and all(group.has(axis) for axis in option.axes)
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
        # Every mesh with every number of micro-batches, of which those are left that can train.
        shapes, micro_batches = np.repeat(meshes, len(counts), axis=0), np.tile(counts, len(meshes))
        is_valid = self.workload.global_batch % (_data_ranks(shapes) * micro_batches) == 0
        pipeline, tensor = _sizes_along("pipeline", shapes), _sizes_along("tensor", shapes)
        # A pipeline may have more micro-batches than the limit: its bubble shrinks with their number.
        is_valid &= micro_batches <= np.maximum(most, PER_STAGE * pipeline * (pipeline > 1))
        if group.has("pipeline"):
            is_valid &= _can_run(use, pipeline, micro_batches, len(self.profile.blocks))
            # With one micro-batch a pipeline takes its usual number, which is among the others.
            if len(self.choices.micro_batches) > 1:
                is_valid &= micro_batches > 1
        if use.tensor.asynchronous:  # along the innermost axis, between the devices of a node
            is_valid &= self.per_node % tensor == 0
        # Ulysses gives each rank whole heads.
        if group.has("sequence") and use.sequence.exchange == "ulysses" and self.profile.trace is not None:
            is_valid &= _divides_heads(self.profile.trace, tensor * _sizes_along("sequence", shapes))
        return shapes[is_valid], micro_batches[is_valid]  # [n, 6], [n]

    @cached_property
    def _allowed_micro_batches(self) -> tuple[np.ndarray, int]:
        counts = np.asarray(sorted(self.choices.micro_batches), dtype=np.int64)
        counts = counts[self.workload.global_batch % counts == 0]
        is_fixed = 1 not in self.choices.micro_batches  # the user's number, which may exceed the limit
        return counts, int(counts.max(initial=1)) if is_fixed else self.max_micro_batches


def _sizes_along(axis: str, shapes: np.ndarray) -> np.ndarray:
    return shapes[:, (*_BATCH_AXES, *MODEL_AXES).index(axis)]  # [n] of [n, 6]


def _data_ranks(shapes: np.ndarray) -> np.ndarray:
    data, zero, expert = (_sizes_along(axis, shapes) for axis in ("data", "zero", "expert"))
    return np.asarray(data * zero * expert)  # ranks along ``expert`` see different data, too


def _fits_compiler(template: Template, use: AxisUse) -> bool:
    plan = template.plan
    if plan.whole_backward and _splits_backward(use.pipeline.schedule) and template.group.has("pipeline"):
        return False  # compiled blocks compute both parts of a backward pass at once
    # Inductor alone joins products with their exchanges.
    return plan.compiler == "inductor" or not use.tensor.asynchronous


def axis_options(choices: Choices) -> tuple[AxisOption, ...]:
    """Every option for the axes that divide the model, the default first."""
    options = []
    for items in itertools.product(*choices.options.values()):  # ``None`` first, for the default
        methods = tuple(item for item in items if item is not None)
        axes = frozenset(axis for item in methods for axis in axes_of(item))
        options.append(AxisOption(methods, AxisUse.of(fold_plan(methods)), axes))
    return tuple(options)


@cache
def _splits_backward(schedule: str) -> bool:
    return schedule != "auto" and get_schedule(schedule).splits_backward


def _can_run(use: AxisUse, pipeline: np.ndarray, micro_batches: np.ndarray, pieces: int) -> np.ndarray:
    # 1F1B, which runs any number of micro-batches, stands for a schedule that is chosen later.
    info = get_schedule("1F1B" if use.pipeline.schedule == "auto" else use.pipeline.schedule)
    stages = use.pipeline.stages_per_rank or info.usual_stages
    pairs = zip(pipeline.tolist(), micro_batches.tolist(), strict=True)
    can = [ranks * stages <= pieces and not info.problem(ranks, count, stages) for ranks, count in pairs]
    return np.asarray(can, dtype=bool)


def _divides_heads(trace: Trace, sizes: np.ndarray) -> np.ndarray:
    heads = {trace.num_heads, trace.num_key_value_heads}  # 0 where unknown, which everything divides
    heads |= {count for segment in trace.segments for count in segment.heads}
    return np.asarray([all(count % size == 0 for count in heads) for size in sizes.tolist()], dtype=bool)
