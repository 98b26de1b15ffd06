"""Mixed-integer programs, written row by row and solved by HiGHS."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import highspy

Terms = dict[int, float]
"""A sum of columns: factors by column."""

ONE = 0
"""The column that is always 1: for what is certain, and for constants."""


_SEARCH = {"mip_allow_restart": False, "mip_heuristic_run_root_reduced_cost": False}
"""What proved slower than branching: 7.3 against 3.5 s for 12 divisions of 122 nodes and 400 options within a memory limit."""


class Solution(NamedTuple):
    """The values of the columns, empty if none were found, with their objective, and the least that it can be."""

    status: Literal["optimal", "infeasible", "time limit"]
    values: tuple[float, ...]
    objective: float
    bound: float
    seconds: float


@dataclass
class Milp:
    """Columns and rows, as HiGHS takes them."""

    lower: list[float] = field(default_factory=lambda: [1.0])
    upper: list[float] = field(default_factory=lambda: [1.0])
    whole: list[bool] = field(default_factory=lambda: [True])
    rows: list[tuple[Terms, float]] = field(default_factory=list)

    def column(self, *, whole: bool = False, lower: float = 0.0, upper: float = 1.0) -> int:
        """A new column between two bounds, which takes whole values only or all."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.lower) - 1

    def at_least(self, larger: Terms, smaller: Terms, *, equal: bool = False) -> None:
        """One sum is at least another, or equal to it."""
        terms = defaultdict(float, larger)
        add(terms, smaller, -1.0)
        self.rows.append((terms, 0.0 if equal else math.inf))

    def largest(self, sums: Iterable[Terms], upper: float = 1.0) -> Terms:
        """The largest of some sums, wherever it is to be small."""
        different: list[Terms] = []
        for terms in sums:
            if terms == {ONE: upper}:
                return terms
            if terms and terms not in different:
                different.append(terms)
        if len(different) < 2:
            return different[0] if different else {}
        most = {self.column(upper=upper): 1.0}
        for terms in different:
            self.at_least(most, terms)
        return most

    def product(self, first: Terms, second: Terms) -> Terms:
        """The product of two sums that are 0 or 1."""
        both = {self.column(): 1.0}
        together = defaultdict(float, first)
        add(together, second)
        self.at_least(defaultdict(float, {**both, ONE: 1.0}), together)
        self.at_least(first, both)
        self.at_least(second, both)
        return both

    def solve(self, objective: Terms, gap: float, time_limit: float) -> Solution:
        """The values that make the objective least.

        Args:
            gap: the relative gap at which the search ends.
            time_limit: seconds after which it ends.
        """
        import highspy  # takes 0.2 s

        # Tolerances are absolute: the usual factor is made 1.
        unit = median([abs(factor) for factor in objective.values() if factor] or [1.0])
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.lower), len(self.rows)
        costs = np.zeros(len(self.lower))
        costs[list(objective)] = np.array(list(objective.values())) / unit
        program.col_cost_ = costs
        program.col_lower_, program.col_upper_ = np.array(self.lower), np.array(self.upper)
        program.row_lower_ = np.zeros(len(self.rows))
        program.row_upper_ = np.array([upper for _, upper in self.rows])
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        program.integrality_ = [kinds[whole] for whole in self.whole]
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(terms) for terms, _ in self.rows)])
        matrix.index_ = np.fromiter(chain.from_iterable(terms for terms, _ in self.rows), np.int32)
        matrix.value_ = np.fromiter(chain.from_iterable(terms.values() for terms, _ in self.rows), np.float64)
        highs = _silent()
        limits = {"threads": 1, "mip_rel_gap": gap, "mip_abs_gap": 0.0, "time_limit": time_limit}
        for option, value in (limits | _SEARCH).items():
            highs.setOptionValue(option, value)
        highs.passModel(program)
        highs.run()
        return _solution(highs, unit)


def _silent() -> highspy.Highs:
    """HiGHS without its log; highspy 1.16 writes a first line before an option can be set."""
    import highspy

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    return Silent()  # type: ignore[no-untyped-call]


def _solution(highs: highspy.Highs, unit: float) -> Solution:
    import highspy

    found, info, status = highs.getModelStatus(), highs.getInfo(), highspy.HighsModelStatus
    seconds = highs.getRunTime()
    if found in (status.kInfeasible, status.kUnboundedOrInfeasible):
        return Solution("infeasible", (), math.inf, math.inf, seconds)
    assert found in (status.kOptimal, status.kTimeLimit), f"HiGHS ended with {found}"
    values = tuple(highs.getSolution().col_value) if info.primal_solution_status == 2 else ()
    objective, bound = info.objective_function_value * unit, info.mip_dual_bound * unit
    return Solution(
        "optimal" if found == status.kOptimal else "time limit", values, objective, bound, seconds
    )


def add(terms: Terms, more: Terms, factor: float = 1.0) -> None:
    """Adds a sum, multiplied by a factor, to another."""
    for column, value in more.items():
        terms[column] = terms.get(column, 0.0) + factor * value
