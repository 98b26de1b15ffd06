"""Priced rows: every template on every mesh with every number of micro-batches, as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import AxisUse, Estimate, PlanTable, Prices, Workload, kind_of, price
from atorch_ns.method import Chosen, fold_plan
from atorch_ns.pipeline import get_schedule
from atorch_ns.profile import Profile, Trace
from atorch_ns.search._choices import Choices, axes_of
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._templates import MeshGroup, Template, Templates, steps_of
from atorch_ns.strategy import MODEL_AXES, AxisSize, Plan

__all__ = ["PricedRows", "price_rows"]

PER_STAGE = 4
"""Micro-batches for each rank of a pipeline, at most: with so many a fifth of a step is bubble; more cost samples
that a micro-batch could have."""

_ORDER = ("tensor", "sequence", "expert", "zero", "data", "pipeline")
"""Axes from the inside out, as meshes of a search have them."""


_USUAL = AxisUse()


@dataclass(frozen=True)
class Use:
    """One way to use the axes of a mesh that divide the model.

    Attributes:
        chosen: the methods that use them otherwise than by default.
        plan: what these decide.
        axes: those that they use.
    """

    chosen: tuple[Chosen, ...] = ()
    plan: AxisUse = _USUAL
    axes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PricedRows:
    """Strategies as rows.

    Attributes:
        templates: combinations of methods.
        template: [N] index into them.
        shapes: [N, 6] sizes of the axes, as :data:`~atorch_ns.search._templates.Shape` has them.
        micro_batches: [N] passes.
        prices: of the rows; ``None`` where nothing could be priced.
        peak_bytes, step_seconds: [N] predicted; all 0 where nothing could be priced.
        passes: the choice that gives each number of passes.
        use: [N] index into ``uses``.
        uses: ways to use the axes that divide the model.
    """

    templates: tuple[Template, ...]
    template: np.ndarray
    shapes: np.ndarray
    micro_batches: np.ndarray
    prices: Prices | None
    peak_bytes: np.ndarray
    step_seconds: np.ndarray
    passes: dict[int, Chosen | None]
    use: np.ndarray
    uses: tuple[Use, ...]

    def __len__(self) -> int:
        return len(self.template)

    def estimate(self, row: int) -> Estimate | None:
        """What a row is predicted to cost; ``None`` where nothing could be priced."""
        return None if self.prices is None else self.prices.estimate(row)

    def steps(self, row: int) -> list[tuple[str, object]]:
        """The entries of a row's strategy."""
        template = self.templates[self.template[row]]
        mesh = template.group.meshes[tuple(self.shapes[row].tolist())]
        chosen = (*self.uses[self.use[row]].chosen, *template.chosen)
        return steps_of(chosen, mesh, self.passes[int(self.micro_batches[row])])


def price_rows(
    found: Templates,
    choices: Choices,
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
    settings: SearchSettings,
) -> PricedRows:
    """All rows, priced where there are a trace and hardware figures.

    Only rows whose ranks and micro-batches divide the batch are there, which may be none. The number of
    micro-batches goes up to ``settings.max_micro_batches``; one that the user fixed may be larger.
    """
    templates = found.distinct
    rows = _Rows(choices, profile, workload, settings)
    uses = ways_of(choices)
    columns = [rows.of(index, one, uses) for index, one in enumerate(templates)]
    template, shapes, use, passes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    peak, seconds = np.zeros(len(template)), np.zeros(len(template))
    prices = None
    if len(template) and profile.trace is not None and cluster.hardware is not None:
        kinds = _Kinds.of(templates, uses, profile.trace)
        table = PlanTable(
            kinds.plans,
            kinds.template[template],
            shapes[:, 0],
            shapes[:, 1],
            passes,
            shapes[:, 2:],
            kinds.use[template, use],
            kinds.uses,
        )
        prices = price(table, profile, cluster, workload)
        peak, seconds = prices.peak_bytes, prices.step_seconds
    return PricedRows(templates, template, shapes, passes, prices, peak, seconds, choices.passes, use, uses)


@dataclass(frozen=True)
class _Kinds:
    """What templates are priced as: those whose axes stand in one order differ in sizes only, and what no price
    depends on is left out.

    Attributes:
        plans: the kinds.
        template: for each template, its kind.
        uses: how axes are used.
        use: [templates, uses] of each template used so, the index into ``uses``.
    """

    plans: tuple[Plan, ...]
    template: np.ndarray
    uses: tuple[AxisUse, ...]
    use: np.ndarray

    @classmethod
    def of(cls, templates: tuple[Template, ...], ways: tuple[Use, ...], trace: Trace) -> _Kinds:
        kinds: dict[Plan, int] = {}
        uses: dict[AxisUse, int] = {}
        index, use = [], []
        # What no price depends on; what replaced modules cost is known of some models.
        alike: dict[str, Any] = {"experts": None, **_USUAL._asdict()}
        if not any(segment.replaced_costs for segment in trace.segments):
            alike["replaced"] = False
        for one in templates:
            kind = kind_of(one.plan, axes=_order(one.plan.axes), **alike)
            index.append(kinds.setdefault(kind, len(kinds)))
            own = AxisUse.of(one.plan)
            use.append([uses.setdefault(way.plan.over(own), len(uses)) for way in ways])
        return cls(
            tuple(kinds), np.asarray(index, dtype=np.int64), tuple(uses), np.asarray(use, dtype=np.int64)
        )


@cache
def _order(axes: tuple[AxisSize, ...]) -> tuple[AxisSize, ...]:
    """The axes of a kind, without sizes: all of them, where those there are stand in the order of most meshes."""
    places = [_ORDER.index(name) for name, _ in axes if name in _ORDER]
    usual = len(places) == len(axes) and places == sorted(places)
    return tuple((name, 0) for name in (_ORDER if usual else dict(axes)))


@dataclass(frozen=True)
class _Rows:
    """Makes the rows of templates.

    Attributes:
        choices: what they are put together from.
        profile: of the model.
        workload: of a step.
        settings: of the search.
        known: meshes with their micro-batches, by group and use.
        ways: ways that are open, by group and what a template says itself.
        axes: axes that methods use, by identity.
    """

    choices: Choices
    profile: Profile
    workload: Workload
    settings: SearchSettings
    known: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    ways: dict[tuple[object, ...], list[tuple[int, AxisUse]]] = field(default_factory=dict)
    axes: dict[int, frozenset[str]] = field(default_factory=dict)

    def of(
        self, index: int, template: Template, ways: Sequence[Use]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of one template: its index, [n, 6] shapes, [n] uses and [n] numbers of micro-batches."""
        own = AxisUse.of(template.plan)
        filled = self._filled(template.chosen)
        apart = _takes_apart(template.plan)
        parts = []
        for place, use in self._open(template.group, own, filled, ways):
            if not apart and _splits(use.schedule) and template.group.has("pipeline"):
                continue
            shapes, passes = self._columns(template.group, use)
            parts.append((shapes, np.full(len(passes), place), passes))
        if not parts:
            return (
                np.zeros(0, int),
                np.zeros((0, 2 + len(MODEL_AXES)), int),
                np.zeros(0, int),
                np.zeros(0, int),
            )
        shapes, used, passes = (np.concatenate(each) for each in zip(*parts, strict=True))
        return np.full(len(passes), index), shapes, used, passes

    def _filled(self, chosen: tuple[Chosen, ...]) -> frozenset[str]:
        """The axes that methods of a template use."""
        for item in chosen:
            if id(item) not in self.axes:
                self.axes[id(item)] = frozenset(axes_of(item))
        return frozenset().union(*(self.axes[id(item)] for item in chosen))

    def _open(
        self, group: MeshGroup, own: AxisUse, filled: frozenset[str], ways: Sequence[Use]
    ) -> list[tuple[int, AxisUse]]:
        """The ways that are open on a group of meshes: their places, and what they come to beside ``own``."""
        key = (id(group), own, filled)
        if key not in self.ways:
            self.ways[key] = [
                (place, way.plan.over(own))
                for place, way in enumerate(ways)
                if not way.axes & filled and all(group.has(axis) for axis in way.axes)
            ]
        return self.ways[key]

    def _columns(self, group: MeshGroup, use: AxisUse) -> tuple[np.ndarray, np.ndarray]:
        """[n, 6] shapes of a group with [n] micro-batches, where they can be used so."""
        key = (id(group), use)
        if key not in self.known:
            self.known[key] = self._found(group, use)
        return self.known[key]

    def _found(self, group: MeshGroup, use: AxisUse) -> tuple[np.ndarray, np.ndarray]:
        counts, most = self._allowed
        meshes = np.asarray(list(group.meshes), dtype=np.int64)  # [M, 6]
        shapes = np.repeat(meshes, len(counts), axis=0)
        passes = np.tile(counts, len(meshes))
        data_ranks = shapes[:, 0] * shapes[:, 1] * shapes[:, 2 + MODEL_AXES.index("expert")]
        kept = self.workload.global_batch % (data_ranks * passes) == 0
        pipeline = shapes[:, 2 + MODEL_AXES.index("pipeline")]
        kept &= passes <= np.maximum(most, PER_STAGE * pipeline * (pipeline > 1))
        if group.has("pipeline"):
            kept &= _can_run(use, pipeline, passes, len(self.profile.blocks))
            if len(counts) > 1:  # with one pass a pipeline takes its usual number, which is among the others
                kept &= passes > 1
        if group.has("sequence") and use.sequence_exchange == "ulysses" and self.profile.trace is not None:
            sizes = shapes[:, [2 + MODEL_AXES.index(name) for name in ("tensor", "sequence")]].prod(axis=1)
            kept &= _divides_heads(self.profile.trace, sizes)
        return shapes[kept], passes[kept]

    @cached_property
    def _allowed(self) -> tuple[np.ndarray, int]:
        """Numbers of micro-batches, and the largest that is meant for plans without a pipeline."""
        counts = np.asarray(sorted(self.choices.passes), dtype=np.int64)
        fixed = 1 not in self.choices.passes
        return counts, int(counts[-1]) if fixed else self.settings.max_micro_batches


def ways_of(choices: Choices) -> tuple[Use, ...]:
    """Every way to use the axes that divide the model, the default first."""
    found = []
    for items in itertools.product(*choices.uses.values()):
        chosen = tuple(item for item in items if item is not None)
        axes = frozenset(axis for item in chosen for axis in axes_of(item))
        found.append(Use(chosen, AxisUse.of(fold_plan(chosen)), axes))
    return tuple(found)


def _takes_apart(plan: Plan) -> bool:
    """Whether a backward pass can be taken in two parts: that needs parameters that stay gathered."""
    return not plan.whole_backward and (plan.keeps_gathered or not plan.parameters_over)


@cache
def _splits(schedule: str) -> bool:
    return schedule != "auto" and get_schedule(schedule).splits_backward


def _can_run(use: AxisUse, pipeline: np.ndarray, passes: np.ndarray, pieces: int) -> np.ndarray:
    """[n] whether the schedule runs so many micro-batches, and the model has so many pieces."""
    info = get_schedule("1F1B" if use.schedule == "auto" else use.schedule)
    stages = use.stages_per_rank or info.usual_stages
    pairs = zip(pipeline.tolist(), passes.tolist(), strict=True)
    return np.asarray(
        [ranks * stages <= pieces and not info.problem(ranks, count, stages) for ranks, count in pairs],
        dtype=bool,
    )


def _divides_heads(trace: Trace, sizes: np.ndarray) -> np.ndarray:
    """[n] whether the heads of all attentions divide, as far as they are known."""
    heads = {trace.num_heads, trace.num_key_value_heads}
    heads |= {count for segment in trace.segments for count in segment.heads}
    return np.asarray([all(count % size == 0 for count in heads) for size in sizes.tolist()], dtype=bool)
