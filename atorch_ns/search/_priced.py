"""Priced rows: every template on every mesh with every number of micro-batches, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import Estimate, PlanTable, Prices, Workload, price
from atorch_ns.method import Chosen
from atorch_ns.profile import Profile
from atorch_ns.search._choices import Choices
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._templates import Template, Templates, steps_of

__all__ = ["PricedRows", "price_rows"]


@dataclass(frozen=True)
class PricedRows:
    """Strategies as rows.

    Attributes:
        templates: combinations of methods.
        template: [N] index into them.
        data, zero: [N] sizes of the axes.
        micro_batches: [N] passes.
        prices: of the rows; ``None`` where nothing could be priced.
        peak_bytes, step_seconds: [N] predicted; all 0 where nothing could be priced.
        passes: the choice that gives each number of passes.
    """

    templates: tuple[Template, ...]
    template: np.ndarray
    data: np.ndarray
    zero: np.ndarray
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
        mesh = template.group.meshes[int(self.data[row]), int(self.zero[row])]
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
    columns = [_columns(index, one, counts, workload) for index, one in enumerate(templates)]
    template, data, zero, passes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    peak, seconds = np.zeros(len(template)), np.zeros(len(template))
    prices = None
    if len(template) and profile.trace is not None and cluster.hardware is not None:
        table = PlanTable(tuple(one.plan for one in templates), template, data, zero, passes)
        prices = price(table, profile, cluster, workload)
        peak, seconds = prices.peak_bytes, prices.step_seconds
    return PricedRows(templates, template, data, zero, passes, prices, peak, seconds, choices.passes)


def _allowed(choices: Choices, settings: SearchSettings) -> np.ndarray:
    counts = sorted(choices.passes)
    fixed = 1 not in choices.passes
    return np.asarray([n for n in counts if fixed or n <= settings.max_micro_batches], dtype=np.int64)


def _columns(
    index: int, template: Template, counts: np.ndarray, workload: Workload
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    meshes = np.asarray(list(template.group.meshes), dtype=np.int64)  # [M, 2]
    mesh = np.repeat(np.arange(len(meshes)), len(counts))
    passes = np.tile(counts, len(meshes))
    data, zero = meshes[mesh, 0], meshes[mesh, 1]
    kept = workload.global_batch % (data * zero * passes) == 0
    return np.full(int(kept.sum()), index), data[kept], zero[kept], passes[kept]
