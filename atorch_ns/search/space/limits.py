"""Limits of a search's candidates: the memory of a rank, and how many priced rows become candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import Estimate
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.space.candidate import largest_part
from atorch_ns.search.space.priced import PricedRows
from atorch_ns.text import bytes_text, interval_text

MEMORY_ERROR = 0.05  # relative error of the predicted peak: candidates over the limit by less are tried
CPU_RESERVE = 0.1  # share of a CPU's memory for other users; on a GPU, estimates count everything held

MAX_FITTING = 160  # candidates that fit
MAX_TOO_LARGE = 40  # candidates that are reported as too large
MAX_PER_TEMPLATE = 6  # fastest rows of one combination of methods


@dataclass(frozen=True)
class Limits:
    """The memory limit of one rank.

    Attributes:
        num_bytes: the limit; 0 where the device's memory is unknown, which admits everything.
    """

    num_bytes: int

    def admits(self, peak_bytes: float) -> bool:
        """Returns whether a predicted peak fits, or may fit within the estimate's error."""
        return bool(self.admit(np.asarray([peak_bytes]))[0])

    def admit(self, peak_bytes: np.ndarray) -> np.ndarray:
        """:meth:`admits` for an array."""
        if not self.num_bytes:
            return np.ones(len(peak_bytes), dtype=bool)
        return peak_bytes <= self.num_bytes * (1 + MEMORY_ERROR)

    def refusal(self, estimate: Estimate) -> str:
        """The message for an estimate that does not fit."""
        size = interval_text(estimate.peak_bytes, estimate.peak_bytes_interval, bytes_text)
        return f"needs {size}, over the limit of {bytes_text(self.num_bytes)} (predicted; largest part: {largest_part(estimate)})"


def memory_limit(cluster: Cluster, settings: SearchSettings) -> Limits:
    """The memory limit of one rank: the setting (on GPUs their memory at most) or memory less a reserve."""
    if settings.memory_limit_gib is not None:
        limit, memory = int(settings.memory_limit_gib * 2**30), cluster.rank_memory_bytes
        return Limits(min(limit, memory) if cluster.device_type != "cpu" and memory else limit)
    reserve = settings.memory_reserve
    if reserve is None:
        reserve = CPU_RESERVE if cluster.device_type == "cpu" else 0.0
    return Limits(int(cluster.rank_memory_bytes * (1 - reserve)))


@dataclass(frozen=True)
class RowSelection:
    """The rows that become candidates.

    Attributes:
        fitting: rows that fit, best first.
        too_large: rows that do not fit, the nearest first.
        num_slower: number of rows that fit and are left out.
        num_too_large: number of all rows that do not fit.
        slowest_kept: seconds of the slowest row that fits and is kept.
    """

    fitting: tuple[int, ...]
    too_large: tuple[int, ...]
    num_slower: int
    num_too_large: int
    slowest_kept: float | None


def select_rows(rows: PricedRows, limit: Limits) -> RowSelection:
    """Selects the fastest and the smallest row of every combination, then the fastest of all.

    For a combination that fits nowhere, selects the row nearest to fitting.
    """
    fits = limit.admit(rows.peak_bytes) if rows.prices is not None else np.ones(len(rows), dtype=bool)
    by_time = np.lexsort((rows.micro_batches, rows.step_seconds))  # the last key is the first to sort by
    by_memory = np.lexsort((rows.step_seconds, rows.peak_bytes))
    fastest = _first_of_each(rows, by_time[fits[by_time]])
    smallest = _first_of_each(rows, by_memory[fits[by_memory]])
    order = dict.fromkeys([*fastest, *smallest])  # a set that keeps its order
    counts: dict[int, int] = {}
    for row in by_time[fits[by_time]][: 20 * MAX_FITTING].tolist():
        index = int(rows.template[row])
        counts[index] = counts.get(index, 0) + 1
        if counts[index] <= MAX_PER_TEMPLATE:
            order.setdefault(row)
    best_rows = list(order)[:MAX_FITTING]
    templates = {int(rows.template[row]) for row in fastest}  # combinations that fit somewhere
    nearest = _first_of_each(rows, by_memory[~fits[by_memory]])
    nearest = [row for row in nearest if int(rows.template[row]) not in templates]
    num_fitting = int(fits.sum())
    return RowSelection(
        fitting=tuple(best_rows),
        too_large=tuple(nearest[:MAX_TOO_LARGE]),
        num_slower=num_fitting - len(best_rows),
        num_too_large=len(rows) - num_fitting,
        slowest_kept=float(rows.step_seconds[best_rows].max()) if best_rows else None,
    )


def _first_of_each(rows: PricedRows, order: np.ndarray) -> list[int]:
    _, first = np.unique(rows.template[order], return_index=True)
    return [int(order[position]) for position in np.sort(first)]  # as in ``order``, not by template
