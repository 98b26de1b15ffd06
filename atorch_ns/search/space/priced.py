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

PER_STAGE = 4
"""Most micro-batches for each rank of a pipeline: with so many a fifth of a step is bubble, and more would make
each of them too small."""

_ORDER = ("tensor", "sequence", "expert", "zero", "data", "pipeline")
"""Axes of a search's meshes, from the inside out."""


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
        if self.reduces_each[row]:
            plan = template.plan.changed(sharding={"reduces_each": True})
            chosen = tuple(_follow_plan(item, plan) for item in chosen)
        return steps_of(chosen, mesh, self.splitters[int(self.micro_batches[row])])


def price_rows(
    found: Templates,
    choices: Choices,
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
    max_micro_batches: int,
    limit_bytes: int = 0,
) -> PricedRows:
    """All rows, priced where there are a trace and hardware figures.

    Where a template leaves it open, gradients are reduced after every micro-batch in rows that take more than
    ``limit_bytes`` with whole ones; 0 for no limit. Only rows whose ranks and micro-batches divide the batch are made, which may be none. The number of
    micro-batches goes up to ``max_micro_batches``; one that the user fixed may be larger.
    """
    templates = found.distinct
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
    """[N] whether gradients may be kept whole until the last micro-batch, or reduced after each."""
    is_open = np.asarray([plan.sharding.reduces_each is None for plan in table.templates], dtype=bool)
    is_whole = table.model[:, MODEL_AXES.index("pipeline")] == 1
    return np.asarray(is_open[table.template] & is_whole & (table.micro_batches > 1))


def _follow_plan(item: Chosen, plan: Plan) -> Chosen:
    if not isinstance(item.method, FollowsPlan):
        return item
    return replace(item, config=item.method.following(item.config, plan))


def batch_divisors(
    found: Templates, choices: Choices, profile: Profile, workload: Workload, max_micro_batches: int
) -> list[int]:
    """The numbers of equal parts that some row divides a global batch into: data-parallel ranks times micro-batches."""
    anything = replace(workload, global_batch=0)  # which every number divides
    rows = _Rows(choices, axis_options(choices), profile, anything, max_micro_batches, per_node=0)
    columns = (rows.of(index, template) for index, template in enumerate(found.distinct))
    products = (_data_ranks(shapes) * counts for _, shapes, _, counts in columns)
    return sorted({number for product in products for number in product.tolist()})


@dataclass(frozen=True)
class _Kinds:
    """Kinds of templates with the same price: those whose axes are in one order differ in sizes only, and what no
    price depends on is left out.

    Attributes:
        plans: the kinds.
        template: [templates] index into ``plans``.
        uses: distinct settings of the axes.
        use: [templates, options] index into ``uses``.
    """

    plans: tuple[Plan, ...]
    template: np.ndarray
    uses: tuple[AxisUse, ...]
    use: np.ndarray

    @classmethod
    def of(cls, templates: tuple[Template, ...], options: tuple[AxisOption, ...], trace: Trace) -> _Kinds:
        kinds: dict[Plan, int] = {}
        uses: dict[AxisUse, int] = {}
        index, use = [], []
        rows: dict[AxisUse, list[int]] = {}  # few templates set something of axes themselves
        # What no price depends on; what replaced modules cost is known of some models.
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
    """The axes of a kind without sizes: all axes, where those of the plan are in the order of most meshes."""
    places = [_ORDER.index(name) for name, _ in axes if name in _ORDER]
    usual = len(places) == len(axes) and places == sorted(places)
    return tuple((name, 0) for name in (_ORDER if usual else dict(axes)))


@dataclass(frozen=True)
class _Rows:
    """Makes the rows of templates.

    Attributes:
        choices: the alternatives of every method.
        options: options for the axes that divide the model.
        max_micro_batches: largest number of micro-batches without a pipeline.
        per_node: ranks of a node; 0 for any number.
        known: meshes with their micro-batches, by group and setting of the axes.
        possible: options that are possible, by group and what a template sets itself.
        axes: axes that methods use, by identity of the choice.
    """

    choices: Choices
    options: tuple[AxisOption, ...]
    profile: Profile
    workload: Workload
    max_micro_batches: int
    per_node: int
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
                continue
            if use.tensor.asynchronous and template.plan.compiler != "inductor":
                continue
            shapes, counts = self._cached_columns(template.group, use)
            parts.append((shapes, np.full(len(counts), position), counts))
        shapes, option, counts = (np.concatenate(each) for each in zip(*parts, strict=True))
        return np.full(len(counts), index), shapes, option, counts

    def _used_axes(self, chosen: tuple[Chosen, ...]) -> frozenset[str]:
        """The axes that methods of a template use."""
        for item in chosen:
            if id(item) not in self.axes:
                self.axes[id(item)] = frozenset(axes_of(item))
        return frozenset().union(*(self.axes[id(item)] for item in chosen))

    def _find_uses(self, group: MeshGroup, own: AxisUse, filled: frozenset[str]) -> list[tuple[int, AxisUse]]:
        """The options that are possible on a group of meshes: their indices, and what they come to with ``own``."""
        key = (id(group), own, filled)
        if key not in self.possible:
            self.possible[key] = [
                (index, option.plan.over(own))
                for index, option in enumerate(self.options)
                if not option.axes & filled and all(group.has(axis) for axis in option.axes)
            ]
        return self.possible[key]

    def _cached_columns(self, group: MeshGroup, use: AxisUse) -> tuple[np.ndarray, np.ndarray]:
        """[n, 6] shapes of a group with [n] numbers of micro-batches, where this setting of the axes is possible."""
        key = (id(group), use)
        if key not in self.known:
            self.known[key] = self._compute_columns(group, use)
        return self.known[key]

    def _compute_columns(self, group: MeshGroup, use: AxisUse) -> tuple[np.ndarray, np.ndarray]:
        counts, most = self._allowed_micro_batches
        meshes = np.asarray(list(group.meshes), dtype=np.int64)  # [M, 6]
        shapes = np.repeat(meshes, len(counts), axis=0)
        micro_batches = np.tile(counts, len(meshes))
        kept = self.workload.global_batch % (_data_ranks(shapes) * micro_batches) == 0
        pipeline = shapes[:, 2 + MODEL_AXES.index("pipeline")]
        kept &= micro_batches <= np.maximum(most, PER_STAGE * pipeline * (pipeline > 1))
        if group.has("pipeline"):
            kept &= _can_run(use, pipeline, micro_batches, len(self.profile.blocks))
            # With one micro-batch a pipeline takes its usual number, which is among the others.
            if len(self.choices.micro_batches) > 1:
                kept &= micro_batches > 1
        if use.tensor.asynchronous:  # along the innermost axis, between the devices of a node
            kept &= self.per_node % shapes[:, 2 + MODEL_AXES.index("tensor")] == 0
        if group.has("sequence") and use.sequence.exchange == "ulysses" and self.profile.trace is not None:
            sizes = shapes[:, [2 + MODEL_AXES.index(name) for name in ("tensor", "sequence")]].prod(axis=1)
            kept &= _divides_heads(self.profile.trace, sizes)
        return shapes[kept], micro_batches[kept]

    @cached_property
    def _allowed_micro_batches(self) -> tuple[np.ndarray, int]:
        """Numbers of micro-batches, and the largest for plans without a pipeline."""
        counts = np.asarray(sorted(self.choices.micro_batches), dtype=np.int64)
        counts = counts[self.workload.global_batch % counts == 0]
        fixed = 1 not in self.choices.micro_batches
        return counts, int(counts.max(initial=1)) if fixed else self.max_micro_batches


def _data_ranks(shapes: np.ndarray) -> np.ndarray:
    """[n] data-parallel ranks of [n, 6] shapes."""
    product: np.ndarray = shapes[:, 0] * shapes[:, 1] * shapes[:, 2 + MODEL_AXES.index("expert")]
    return product


def axis_options(choices: Choices) -> tuple[AxisOption, ...]:
    """Every option for the axes that divide the model, the default first."""
    options = []
    for items in itertools.product(*choices.options.values()):
        chosen = tuple(item for item in items if item is not None)
        axes = frozenset(axis for item in chosen for axis in axes_of(item))
        options.append(AxisOption(chosen, AxisUse.of(fold_plan(chosen)), axes))
    return tuple(options)


@cache
def _splits_backward(schedule: str) -> bool:
    return schedule != "auto" and get_schedule(schedule).splits_backward


def _can_run(use: AxisUse, pipeline: np.ndarray, micro_batches: np.ndarray, pieces: int) -> np.ndarray:
    """[n] whether the schedule can run this number of micro-batches, and the model has enough pieces."""
    info = get_schedule("1F1B" if use.pipeline.schedule == "auto" else use.pipeline.schedule)
    stages = use.pipeline.stages_per_rank or info.usual_stages
    pairs = zip(pipeline.tolist(), micro_batches.tolist(), strict=True)
    return np.asarray(
        [ranks * stages <= pieces and not info.problem(ranks, count, stages) for ranks, count in pairs],
        dtype=bool,
    )


def _divides_heads(trace: Trace, sizes: np.ndarray) -> np.ndarray:
    """[n] whether the heads of all attentions divide, as far as they are known."""
    heads = {trace.num_heads, trace.num_key_value_heads}
    heads |= {count for segment in trace.segments for count in segment.heads}
    return np.asarray([all(count % size == 0 for count in heads) for size in sizes.tolist()], dtype=bool)
