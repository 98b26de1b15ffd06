"""Planning of divided pipelines: where a model is cut, the devices of each stage, and which stages recompute.

Segments lie between positions where a model may be cut. A dynamic program finds the stages with the least sum
of seconds below a largest term. Lowering that term step by step gives every pair of sum and term that no
other beats and that can be the best, so the least estimate is exact. The best few are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atorch_ns.errors import InputError
from atorch_ns.pipeline.plan.stage_costs import (
    Cost,
    PipelineTask,
    Stage,
    StageCost,
    estimated_seconds,
    largest_term,
    step_seconds,
)
from atorch_ns.text import bytes_text, count_noun

Array = NDArray[np.float64]


class StageSplit(NamedTuple):
    """A sum of seconds, and the column and number of segments of each stage in the order of the model."""

    total: float
    stages: tuple[tuple[int, int], ...]


class _Kinds(NamedTuple):
    """Pairs of a column and a length within a limit, devices, and seconds, ``[level, pair, start]``."""

    columns: NDArray[np.intp]
    lengths: NDArray[np.intp]
    degrees: NDArray[np.intp]
    seconds: Array

    def at(self, position: int) -> Array:
        """Seconds at a position from the end."""
        seconds: Array = self.seconds[min(position, len(self.seconds)) - 1]
        return seconds


@dataclass(frozen=True, eq=False)
class StageTables:
    """Tables of all possible stages of a model.

    Attributes:
        seconds: terms of the sum, ``[level, column, length, first segment]``; infinite where there is no such
            stage. The last level is that of all positions from it on.
        largest: terms limited in every stage, in the same shape.
        degrees: number of devices of a stage, by column.
        num_devices: total number of devices.
        num_stages: the number of stages; ``None`` for any.
    """

    seconds: Array
    largest: Array
    degrees: Sequence[int]
    num_devices: int
    num_stages: int | None = None

    def __post_init__(self) -> None:
        """Drops stages that are never faster than another one with the same segments and devices."""
        for worse, degree in enumerate(self.degrees):
            for better in range(worse):  # of one degree, the column that recomputes is the later one
                if self.degrees[better] == degree:
                    slower = (self.seconds[:, better] <= self.seconds[:, worse]) & (
                        self.largest[:, better] <= self.largest[:, worse]
                    )
                    self.seconds[:, worse][slower] = self.largest[:, worse][slower] = math.inf

    @property
    def num_segments(self) -> int:
        """The number of segments."""
        return int(self.seconds.shape[3])

    @cached_property
    def terms(self) -> Array:
        """The limited terms, least by column and length, in rising order."""
        return np.unique(self._least_terms[np.isfinite(self._least_terms)])

    @cached_property
    def bound(self) -> float:
        """A lower bound of the sum of seconds of any pipeline."""
        stage, num = self.seconds.min(axis=(0, 1)), self.num_segments  # [length, start], the fastest of each
        rest = np.zeros(num + 1)  # least seconds from each segment on; devices are not counted
        for start in reversed(range(num)):
            rest[start] = (stage[1 : num - start + 1, start] + rest[start + 1 :]).min()
        return float(rest[0])

    def least_sum(self, most: float) -> StageSplit | None:
        """The stages with the least sum of seconds within a limit; ``None`` if there are none.

        Each table holds sums by first segment and number of devices, for the stages from there on. Table
        ``k`` is for ``k`` stages. If any number is allowed, the last is for all that reach the last level.
        """
        columns, lengths = np.nonzero(self._least_terms <= most)  # [K] pairs that can keep to the limit
        largest, seconds = self.largest[:, columns, lengths], self.seconds[:, columns, lengths]
        seconds = np.where(largest <= most, seconds, math.inf)
        # The last level covers all later positions, so equal levels at the end are merged.
        while len(seconds) > 1 and np.array_equal(seconds[-1], seconds[-2]):
            seconds = seconds[:-1]
        kinds = _Kinds(columns, lengths, np.array(self.degrees)[columns], seconds)
        tables = [np.full((self.num_segments + 1, self.num_devices + 1), math.inf)]
        tables[0][self.num_segments, 0] = 0.0  # no stages need no segments and no devices
        # Stages are added from the end of the model: tables[k] puts one more stage before tables[k - 1].
        for position in range(1, (len(seconds) - 1 if self.num_stages is None else self.num_stages) + 1):
            tables.append(self._one_more(tables[-1], kinds, position))
        if self.num_stages is None:
            tables.append(self._any_more(tables[-1], kinds))
        counts = range(1, len(tables)) if self.num_stages is None else [self.num_stages]
        total, count = min((float(tables[count][0, self.num_devices]), count) for count in counts)
        return StageSplit(total, self._find_stages(tables, kinds, count)) if total < math.inf else None

    @cached_property
    def _least_terms(self) -> Array:
        least: Array = self.largest.min(axis=(0, 3))
        return least

    def _one_more(self, rest: Array, kinds: _Kinds, position: int) -> Array:
        table = np.full_like(rest, math.inf)
        fewest = (position - 1) * min(self.degrees)  # devices of the stages behind it
        stop = self.num_segments + 2 - position  # each of which has a segment
        for length, degree, seconds in zip(
            kinds.lengths.tolist(), kinds.degrees.tolist(), kinds.at(position), strict=True
        ):
            if stop > length and fewest + degree <= self.num_devices:
                # [start, devices] is a stage before [start + length, devices - degree] of the rest.
                behind = rest[length:stop, fewest : self.num_devices + 1 - degree]
                view = table[: stop - length, fewest + degree :]
                np.minimum(view, seconds[: stop - length, None] + behind, out=view)
        return table

    def _any_more(self, rest: Array, kinds: _Kinds) -> Array:
        """The table with one or more stages of the last level before those of another table."""
        table, either = np.full_like(rest, math.inf), rest.copy()  # either: with such a stage, or ``rest``
        seconds = kinds.seconds[-1]
        by_degree = [
            (degree, np.flatnonzero(kinds.degrees == degree)) for degree in sorted(set(self.degrees))
        ]
        # From the last segment on: a stage reads the sums of later segments, which are complete by then.
        for start in reversed(range(self.num_segments)):
            for degree, alike in by_degree:
                legal = alike[seconds[alike, start] < math.inf]
                if legal.size:
                    behind = either[start + kinds.lengths[legal], : self.num_devices + 1 - degree]
                    view = table[start, degree:]
                    np.minimum(view, (seconds[legal, start, None] + behind).min(axis=0), out=view)
            np.minimum(table[start], rest[start], out=either[start])
        return table

    def _find_stages(self, tables: Sequence[Array], kinds: _Kinds, index: int) -> tuple[tuple[int, int], ...]:
        stages, start, devices = [], 0, self.num_devices
        while index:
            seconds, total = kinds.at(index)[:, start], tables[index][start, devices]
            repeats = self.num_stages is None and index == len(tables) - 1  # it holds any number of stages
            # An entry is the sum of just these two terms, so the stage that it comes from gives it exactly.
            kind, index = next(
                (kind, behind)
                for kind in np.flatnonzero((seconds < math.inf) & (kinds.degrees <= devices))
                for behind in ([index, index - 1] if repeats else [index - 1])
                if seconds[kind] + tables[behind][start + kinds.lengths[kind], devices - kinds.degrees[kind]]
                == total
            )
            stages.append((int(kinds.columns[kind]), int(kinds.lengths[kind])))
            start, devices = start + int(kinds.lengths[kind]), devices - int(kinds.degrees[kind])
        return tuple(stages)


_NUM_SIMULATED = 8  # number of best estimates that are simulated for the final choice
_GROWTH = 1.5
"""The factor between two guesses of the largest term, until the first that a pipeline keeps to."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A pipeline.

    Attributes:
        stages: the stages in the order of the model.
        step_seconds: seconds of the simulated step.
        estimated_seconds: estimate by :func:`~atorch_ns.pipeline.plan.stage_costs.estimated_seconds`.
    """

    stages: tuple[Stage, ...]
    step_seconds: float
    estimated_seconds: float


def plan_stages(cost: Cost, task: PipelineTask) -> StagePlan:
    """The fastest simulated pipeline among those with the best estimates.

    Raises:
        InputError: if no pipeline fits in memory.
    """
    different = {stages: estimate for estimate, stages in _find_candidates(cost, task)}  # without repeats
    candidates = sorted(different.items(), key=lambda row: row[1])[:_NUM_SIMULATED]
    if not candidates:
        raise InputError(_none_fits(cost, task))
    rows = [(step_seconds(stages, task), estimate, stages) for stages, estimate in candidates]
    seconds, estimate, stages = min(rows, key=lambda row: row[:2])
    return StagePlan(stages=stages, step_seconds=seconds, estimated_seconds=estimate)


def _find_candidates(cost: Cost, task: PipelineTask) -> Iterator[tuple[float, tuple[Stage, ...]]]:
    if not task.equal_degrees:
        yield from _Search(cost, task, task.allowed_degrees, task.num_stages).frontier()
        return
    for degree in task.allowed_degrees:  # equal degrees give the number of stages
        count, rest = divmod(task.num_devices, degree)
        if not rest and count <= task.num_segments and task.num_stages in (None, count):
            yield from _Search(cost, task, (degree,), count).frontier()


class _Search:
    """Pipelines with given degrees and a number of stages, or any number."""

    def __init__(
        self, cost: Cost, task: PipelineTask, degrees: Sequence[int], num_stages: int | None
    ) -> None:
        self._cost = cost
        self._task = task
        self._columns = [(degree, again) for degree in degrees for again in sorted(set(task.recompute))]
        most = num_stages or min(task.num_segments, task.num_devices // min(degrees))
        self._levels = range(task.in_flight(1), task.in_flight(most) + 1)  # micro-batches in flight
        num = task.num_segments
        self._seconds = np.full((len(self._levels), len(self._columns), num + 1, num), math.inf)
        self._largest = self._seconds.copy()  # both [level, column, length, start]
        varies = False
        for column in range(len(self._columns)):
            for start in range(num):
                for stop in range(start + 1, num + 1):
                    varies |= self._fill_costs(column, start, stop)
        levels = slice(None if varies else 1)  # one level where no cost varies with it
        self._tables = StageTables(
            self._seconds[levels],
            self._largest[levels],
            [degree for degree, _ in self._columns],
            task.num_devices,
            num_stages,
        )

    def frontier(self) -> Iterator[tuple[float, tuple[Stage, ...]]]:
        """Estimates and stages of pipelines, including one with the least estimate.

        The first is found by raising the largest term until a pipeline keeps to it. A better one has a
        largest term of at most its estimate less the least sum, from which the term is lowered.
        """
        tables = self._tables
        most, optimum = 0.0, tables.least_sum(0.0)
        while optimum is None:
            above = tables.terms[tables.terms > most]
            if not above.size and most >= tables.largest[np.isfinite(tables.largest)].max(initial=0.0):
                return
            most = max([_GROWTH * most, *above[:1]])  # at least to the next term that any stage has
            optimum = tables.least_sum(most)
        best, bound = math.inf, tables.bound
        while optimum is not None:
            stages = self._build_stages(optimum)
            estimate = estimated_seconds(stages, self._task)
            yield estimate, stages
            below = math.nextafter(max(largest_term(stage.cost, self._task) for stage in stages), -math.inf)
            # Lower limits have no smaller sums: a pipeline that beats the best has a term below best - total.
            most = estimate - bound if best == math.inf else min(below, best - optimum.total)
            best = min(best, estimate)
            optimum = tables.least_sum(most)

    def _fill_costs(self, column: int, start: int, stop: int) -> bool:
        first = self._fitting_cost(column, start, stop, 0)
        if first is None:
            return False
        high = len(self._levels) - 1
        last = self._fitting_cost(column, start, stop, high) if high else first
        self._fill_between(column, start, stop, (0, first), high=(high, last))
        return last is None or _step_times(first) != _step_times(last)  # whether costs vary

    def _fill_between(
        self,
        column: int,
        start: int,
        stop: int,
        low: tuple[int, StageCost],
        *,
        high: tuple[int, StageCost | None],
    ) -> None:
        (bottom, first), (top, last) = low, high
        # Costs never fall with the level: equal ends mean equal levels between. Other spans are bisected.
        constant = last is not None and _step_times(first) == _step_times(last)
        if constant or top - bottom < 2:
            self._write_costs(slice(bottom, top + 1 if constant else top), column, start, stop, cost=first)
            if last is not None and not constant:
                self._write_costs(slice(top, top + 1), column, start, stop, cost=last)
            return
        middle = (bottom + top) // 2
        cost = self._fitting_cost(column, start, stop, middle)
        self._fill_between(column, start, stop, low, high=(middle, cost))
        if cost is not None:
            self._fill_between(column, start, stop, (middle, cost), high=high)

    def _write_costs(self, levels: slice, column: int, start: int, stop: int, *, cost: StageCost) -> None:
        send_seconds = self._task.sent(start, self._columns[column][0])
        self._seconds[levels, column, stop - start, start] = cost.seconds + send_seconds
        self._largest[levels, column, stop - start, start] = largest_term(cost, self._task)

    def _fitting_cost(self, column: int, start: int, stop: int, level: int) -> StageCost | None:
        cost = self._cost(start, stop, *self._columns[column], self._levels[level])
        limit = self._task.memory_limit
        return None if cost is None or (limit is not None and cost.memory > limit) else cost

    def _build_stages(self, result: StageSplit) -> tuple[Stage, ...]:
        stages, start = [], 0
        for position, (column, length) in zip(range(len(result.stages), 0, -1), result.stages, strict=True):
            request = (start, start + length, *self._columns[column], self._task.in_flight(position))
            cost = self._cost(*request)  # the tables hold seconds only
            assert cost is not None, f"a stage that was possible is not: {request}"
            stages.append(Stage(*request, cost))
            start += length
        return tuple(stages)


def _step_times(cost: StageCost) -> tuple[float, float]:
    return cost.seconds, cost.per_step


def _none_fits(cost: Cost, task: PipelineTask) -> str:
    what = f"no pipeline of {count_noun(task.num_segments, 'segment')} fits on {count_noun(task.num_devices, 'device')}: "
    for start in range(task.num_segments):  # a segment that fits alone on no stage is the reason
        costs = [
            cost(start, start + 1, degree, again, task.in_flight(1))
            for degree in task.allowed_degrees
            for again in task.recompute
        ]
        least = min((stage_cost.memory for stage_cost in costs if stage_cost is not None), default=None)
        if least is None or (task.memory_limit is not None and least > task.memory_limit):
            need = (
                "cannot be divided so"
                if least is None
                else f"needs {bytes_text(least)} of {bytes_text(task.memory_limit)}"
            )
            return f"{what}segment {start} alone {need}. Use more devices, other degrees, or a smaller micro-batch."
    return (
        f"{what}no stages with {' or '.join(map(str, task.allowed_degrees))} devices each use all devices and keep to the "
        f"memory. Use other degrees or stages, more devices, recomputation, or a smaller micro-batch."
    )
