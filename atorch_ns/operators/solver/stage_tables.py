"""Dynamic program over the stages of a pipeline, from the last to the first.

A stage is some segments, from a first one on, and a column: the number of devices that it takes, and what else tells
it from others. Its seconds depend on its level, which is its position from the end, as far as that matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Found(NamedTuple):
    """A sum of seconds, and the column and the number of segments of each stage, in the order of the model."""

    total: float
    stages: tuple[tuple[int, int], ...]


class _Kinds(NamedTuple):
    """Pairs of a column and a length that keep to a limit, with the column's devices; and seconds, ``[level, pair, start]``."""

    columns: NDArray[np.intp]
    lengths: NDArray[np.intp]
    degrees: NDArray[np.intp]
    seconds: Array

    def at(self, position: int) -> Array:
        """Seconds at a position from the end."""
        own: Array = self.seconds[min(position, len(self.seconds)) - 1]
        return own


@dataclass(frozen=True, eq=False)
class StageTables:
    """All stages of a model.

    Attributes:
        seconds: what is added up over the stages, ``[level, column, length, first segment]``; infinite where there is no
            such stage. The last level is that of all positions from it on.
        largest: what is limited in every stage, likewise.
        degrees: devices of a stage, by column.
        num_devices: devices of all stages together.
        num_stages: the number of stages; ``None`` for any.
    """

    seconds: Array
    largest: Array
    degrees: Sequence[int]
    num_devices: int
    num_stages: int | None = None

    def __post_init__(self) -> None:
        """Leaves out stages that another one of the same segments and devices is nowhere slower than."""
        for worse, degree in enumerate(self.degrees):
            for better in range(worse):
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
        """The least of what is limited, by column and length, in rising order."""
        return np.unique(self._least[np.isfinite(self._least)])

    @cached_property
    def bound(self) -> float:
        """A sum of seconds that no pipeline is below."""
        stage, num = self.seconds.min(axis=(0, 1)), self.num_segments
        rest = np.zeros(num + 1)
        for start in reversed(range(num)):
            rest[start] = (stage[1 : num - start + 1, start] + rest[start + 1 :]).min()
        return float(rest[0])

    def least_sum(self, most: float) -> Found | None:
        """The stages with the least sum of seconds that keep to a limit; ``None`` if there are none.

        Each table holds sums by first segment and number of devices, for the stages from that segment on: the table at index
        ``k`` for ``k`` stages, and the last one for all numbers of stages that reach the last level, if any number is allowed.
        """
        columns, lengths = np.nonzero(self._least <= most)
        largest, seconds = self.largest[:, columns, lengths], self.seconds[:, columns, lengths]
        seconds = np.where(largest <= most, seconds, math.inf)
        while len(seconds) > 1 and np.array_equal(seconds[-1], seconds[-2]):
            seconds = seconds[:-1]
        kinds = _Kinds(columns, lengths, np.array(self.degrees)[columns], seconds)
        tables = [np.full((self.num_segments + 1, self.num_devices + 1), math.inf)]
        tables[0][self.num_segments, 0] = 0.0
        for position in range(1, (len(seconds) - 1 if self.num_stages is None else self.num_stages) + 1):
            tables.append(self._one_more(tables[-1], kinds, position))
        if self.num_stages is None:
            tables.append(self._any_more(tables[-1], kinds))
        counts = range(1, len(tables)) if self.num_stages is None else [self.num_stages]
        total, count = min((float(tables[count][0, self.num_devices]), count) for count in counts)
        return Found(total, self._stages(tables, kinds, count)) if total < math.inf else None

    @cached_property
    def _least(self) -> Array:
        least: Array = self.largest.min(axis=(0, 3))
        return least

    def _one_more(self, rest: Array, kinds: _Kinds, position: int) -> Array:
        """The table with one more stage before those of another table, at a position from the end."""
        table = np.full_like(rest, math.inf)
        fewest = (position - 1) * min(self.degrees)  # devices of the stages behind it
        stop = self.num_segments + 2 - position  # each of which has a segment
        for length, degree, own in zip(
            kinds.lengths.tolist(), kinds.degrees.tolist(), kinds.at(position), strict=True
        ):
            if stop > length and fewest + degree <= self.num_devices:
                behind = rest[length:stop, fewest : self.num_devices + 1 - degree]
                view = table[: stop - length, fewest + degree :]
                np.minimum(view, own[: stop - length, None] + behind, out=view)
        return table

    def _any_more(self, rest: Array, kinds: _Kinds) -> Array:
        """The table with one or more stages before those of another table, all of the last level."""
        table, either = np.full_like(rest, math.inf), rest.copy()
        own = kinds.seconds[-1]
        by_degree = [
            (degree, np.flatnonzero(kinds.degrees == degree)) for degree in sorted(set(self.degrees))
        ]
        for start in reversed(range(self.num_segments)):
            for degree, alike in by_degree:
                legal = alike[own[alike, start] < math.inf]
                if legal.size:
                    behind = either[start + kinds.lengths[legal], : self.num_devices + 1 - degree]
                    view = table[start, degree:]
                    np.minimum(view, (own[legal, start, None] + behind).min(axis=0), out=view)
            np.minimum(table[start], rest[start], out=either[start])
        return table

    def _stages(self, tables: Sequence[Array], kinds: _Kinds, index: int) -> tuple[tuple[int, int], ...]:
        """The stages that led to the whole model's entry in a table."""
        found, start, left = [], 0, self.num_devices
        while index:
            own, total = kinds.at(index)[:, start], tables[index][start, left]
            repeats = self.num_stages is None and index == len(tables) - 1
            kind, index = next(
                (kind, behind)
                for kind in np.flatnonzero((own < math.inf) & (kinds.degrees <= left))
                for behind in ([index, index - 1] if repeats else [index - 1])
                if own[kind] + tables[behind][start + kinds.lengths[kind], left - kinds.degrees[kind]]
                == total
            )
            found.append((int(kinds.columns[kind]), int(kinds.lengths[kind])))
            start, left = start + int(kinds.lengths[kind]), left - int(kinds.degrees[kind])
        return tuple(found)
