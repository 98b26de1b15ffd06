"""Tables of plans for the pricing benchmark and the tests of pricing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from atorch_ns.estimate.table import PlanTable
from atorch_ns.strategy import Plan


def product(
    templates: Iterable[Plan], meshes: Sequence[tuple[int, int]], micro_batches: Sequence[int]
) -> PlanTable:
    """Every template on every mesh, ``(data, zero)``, with every number of micro-batches."""
    kinds = PlanTable.of(list(dict.fromkeys(templates)))
    numbers = np.asarray(micro_batches, dtype=np.int64)
    grid = np.meshgrid(np.arange(len(kinds)), np.arange(len(meshes)), numbers, indexing="ij")
    kind, mesh, passes = (axis.ravel() for axis in grid)
    data, zero = np.asarray(meshes, dtype=np.int64).reshape(-1, 2)[mesh].T
    rows = {"template": kinds.template[kind], "model": kinds.model[kind], "use": kinds.use[kind]}
    return replace(kinds, **rows, data=data, zero=zero, micro_batches=passes)
