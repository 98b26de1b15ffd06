"""Priced rows: every template on every mesh with every number of micro-batches, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import Estimate, PlanTable, Prices, Workload, kind_of, price
from atorch_ns.method import Chosen
from atorch_ns.pipeline import get_schedule
from atorch_ns.profile import Profile
from atorch_ns.search._choices import Choices
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._templates import Template, Templates, steps_of
from atorch_ns.strategy import MODEL_AXES, Plan

__all__ = ["PricedRows", "price_rows"]

PER_STAGE = 4
"""Micro-batches for each rank of a pipeline, at most: with so many a fifth of a step is bubble; more cost samples
that a micro-batch could have."""

_ORDER = ("tensor", "sequence", "expert", "zero", "data", "pipeline")
"""Axes from the inside out, as meshes of a search have them."""


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
    """

    templates: tuple[Template, ...]
    template: np.ndarray
    shapes: np.ndarray
    micro_batches: np.ndarray
    prices: Prices | None
    peak_bytes: np.ndarray
    step_seconds: np.ndarray
    passes: dict[int, Chosen | None]

    def __len__(self) -> int:
        return len(self.template)

    def estimate(self, row: int) -> Estimate | None:
        """What a row is predicted to cost; ``None`` where nothing could be priced."""
        return None if self.prices is None else self.prices.estimate(row)

    def steps(self, row: int) -> list[tuple[str, object]]:
        """The entries of a row's strategy."""
        template = self.templates[self.template[row]]
        mesh = template.group.meshes[tuple(self.shapes[row].tolist())]
        return steps_of(template.chosen, mesh, self.passes[int(self.micro_batches[row])])


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
    counts = _allowed(choices, settings)
    columns = [_columns(index, one, counts, workload, profile) for index, one in enumerate(templates)]
    template, shapes, passes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    peak, seconds = np.zeros(len(template)), np.zeros(len(template))
    prices = None
    if len(template) and profile.trace is not None and cluster.hardware is not None:
        plans, kinds = _kinds(templates)
        table = PlanTable(plans, kinds[template], shapes[:, 0], shapes[:, 1], passes, shapes[:, 2:])
        prices = price(table, profile, cluster, workload)
        peak, seconds = prices.peak_bytes, prices.step_seconds
    return PricedRows(templates, template, shapes, passes, prices, peak, seconds, choices.passes)


def _kinds(templates: tuple[Template, ...]) -> tuple[tuple[Plan, ...], np.ndarray]:
    """What the templates are priced as: those whose axes stand in one order differ in sizes only; and for each
    template which of these it is."""
    kinds: dict[Plan, int] = {}
    index = []
    for one in templates:
        order = tuple(name for name, _ in one.plan.axes)
        axes = tuple((name, 0) for name in (_ORDER if _is_ordered(order) else order))
        kind = replace(kind_of(one.plan), axes=axes)
        index.append(kinds.setdefault(kind, len(kinds)))
    return tuple(kinds), np.asarray(index, dtype=np.int64)


def _is_ordered(names: tuple[str, ...]) -> bool:
    """Whether axes stand in the order in which most meshes have them."""
    places = [_ORDER.index(name) for name in names if name in _ORDER]
    return len(places) == len(names) and places == sorted(places)


def _allowed(choices: Choices, settings: SearchSettings) -> tuple[np.ndarray, int]:
    """Numbers of micro-batches, and the largest that is meant for plans without a pipeline."""
    counts = np.asarray(sorted(choices.passes), dtype=np.int64)
    fixed = 1 not in choices.passes
    return counts, int(counts[-1]) if fixed else settings.max_micro_batches


def _columns(
    index: int, template: Template, allowed: tuple[np.ndarray, int], workload: Workload, profile: Profile
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts, most = allowed
    meshes = np.asarray(list(template.group.meshes), dtype=np.int64)  # [M, 6]
    shapes = np.repeat(meshes, len(counts), axis=0)
    passes = np.tile(counts, len(meshes))
    data_ranks = shapes[:, 0] * shapes[:, 1] * shapes[:, 2 + MODEL_AXES.index("expert")]
    kept = workload.global_batch % (data_ranks * passes) == 0
    pipeline = shapes[:, 2 + MODEL_AXES.index("pipeline")]
    kept &= passes <= np.maximum(most, PER_STAGE * pipeline * (pipeline > 1))
    if (pipeline > 1).any():
        kept &= _can_run(template.plan, pipeline, passes, profile)
    return np.full(int(kept.sum()), index), shapes[kept], passes[kept]


def _can_run(plan: Plan, pipeline: np.ndarray, passes: np.ndarray, profile: Profile) -> np.ndarray:
    """Whether the schedule runs so many micro-batches, and the model has so many pieces."""
    info = get_schedule("1F1B" if plan.schedule == "auto" else plan.schedule)
    stages = plan.stages_per_rank or info.usual_stages
    pieces = len(profile.blocks)
    found = np.ones(len(pipeline), dtype=bool)
    for row, (ranks, count) in enumerate(zip(pipeline.tolist(), passes.tolist(), strict=True)):
        if ranks > 1:
            found[row] = ranks * stages <= pieces and not info.problem(ranks, count, stages)
    return found
