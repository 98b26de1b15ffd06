"""A division problem as a mixed-integer program, which HiGHS solves.

Every option of a node is a 0-1 column; the label of a value is the sum of its producer's options. A use needs
a label as much as the reader that needs it most. That need is split into one column for each conversion to
the label, each at most the label that it starts from. This form has a tight relaxation, so HiGHS rarely
branches. A column is left out where a sum of others takes its place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain, repeat
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from atorch_ns.operators.solver.problem import Label, Option, PlacementProblem, Use, UseReader

if TYPE_CHECKING:
    import highspy


Terms = dict[int, float]
"""A sum of columns: factors by column."""

ONE = 0
"""The column that is always 1, for fixed choices and for constants."""


# Slower than branching: 7.3 against 3.5 s for 12 divisions of 122 nodes and 400 options within a limit.
_SEARCH = {"mip_allow_restart": False, "mip_heuristic_run_root_reduced_cost": False}


class Solution(NamedTuple):
    """The columns' values (empty if none were found), the objective and its lower bound."""

    status: Literal["optimal", "infeasible", "time limit"]
    values: tuple[float, ...]
    objective: float
    bound: float
    seconds: float


@dataclass
class Milp:
    """Columns and rows, as HiGHS takes them."""

    lower: list[float] = field(default_factory=lambda: [1.0])  # the first column is ONE
    upper: list[float] = field(default_factory=lambda: [1.0])
    whole: list[bool] = field(default_factory=lambda: [True])
    rows: list[tuple[Terms, float]] = field(default_factory=list)  # 0 <= sum <= the number

    def column(self, *, whole: bool = False, lower: float = 0.0, upper: float = 1.0) -> int:
        """Adds a column with two bounds, whole-valued or continuous."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.lower) - 1

    def at_least(self, larger: Terms, smaller: Terms, *, equal: bool = False) -> None:
        """Demands that one sum is at least another, or equal to it."""
        terms = defaultdict(float, larger)
        add(terms, smaller, -1.0)
        self.rows.append((terms, 0.0 if equal else math.inf))

    def largest(self, sums: Iterable[Terms], upper: float = 1.0) -> Terms:
        """The maximum of some sums, for an objective that minimises it."""
        different: list[Terms] = []
        for terms in sums:
            if terms == {ONE: upper}:  # no sum exceeds its upper bound
                return terms
            if terms and terms not in different:
                different.append(terms)
        if len(different) < 2:
            return different[0] if different else {}
        most = {self.column(upper=upper): 1.0}
        for terms in different:  # the objective presses it down to the largest
            self.at_least(most, terms)
        return most

    def product(self, first: Terms, second: Terms) -> Terms:
        """The product of two sums that are 0 or 1."""
        both = {self.column(): 1.0}
        together = defaultdict(float, first)
        add(together, second)
        self.at_least(defaultdict(float, {**both, ONE: 1.0}), together)  # both >= first + second - 1
        self.at_least(first, both)
        self.at_least(second, both)
        return both

    def solve(self, objective: Terms, gap: float, time_limit: float) -> Solution:
        """Minimises the objective.

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
        matrix.start_ = np.cumsum([0, *(len(terms) for terms, _ in self.rows)])  # compressed rows
        matrix.index_ = np.fromiter(chain.from_iterable(terms for terms, _ in self.rows), np.int32)
        matrix.value_ = np.fromiter(chain.from_iterable(terms.values() for terms, _ in self.rows), np.float64)
        highs = _make_silent_solver()
        limits = {"threads": 1, "mip_rel_gap": gap, "mip_abs_gap": 0.0, "time_limit": time_limit}
        for option, value in (limits | _SEARCH).items():
            highs.setOptionValue(option, value)
        highs.passModel(program)
        highs.run()
        return _read_solution(highs, unit)


def _make_silent_solver() -> highspy.Highs:
    import highspy

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:  # highspy 1.16 writes a line before options can be set
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    return Silent()  # type: ignore[no-untyped-call]


def _read_solution(highs: highspy.Highs, unit: float) -> Solution:
    import highspy

    model_status, info, status = highs.getModelStatus(), highs.getInfo(), highspy.HighsModelStatus
    seconds = highs.getRunTime()
    if model_status in (status.kInfeasible, status.kUnboundedOrInfeasible):
        return Solution("infeasible", (), math.inf, math.inf, seconds)
    assert model_status in (status.kOptimal, status.kTimeLimit), f"HiGHS ended with {model_status}"
    values = tuple(highs.getSolution().col_value) if info.primal_solution_status == 2 else ()  # 2: feasible
    objective, bound = info.objective_function_value * unit, info.mip_dual_bound * unit
    return Solution(
        "optimal" if model_status == status.kOptimal else "time limit", values, objective, bound, seconds
    )


def add(terms: Terms, more: Terms, factor: float = 1.0) -> None:
    """Adds a sum, multiplied by a factor, to another."""
    for column, value in more.items():
        terms[column] = terms.get(column, 0.0) + factor * value


Options = Sequence[Sequence[int]]
"""Indices of the allowed options, by node."""


class Program:
    """The program of a problem.

    Args:
        options: the allowed options. Conversions connect all of them.
        memory_unit: number of bytes that count as 1.
    """

    def __init__(self, problem: PlacementProblem, options: Options, memory_unit: float = 1.0) -> None:
        self._problem = problem
        self._options = options
        self._unit = memory_unit
        self._milp = Milp()
        self._seconds: Terms = {}
        self._memory: Terms = {}  # this and the following in memory units
        self._stash: Terms = {}  # until the backward pass
        self._gradients: Terms = {}  # they come as saved memory goes: the larger of the two counts
        self._inner: dict[str, Terms] = defaultdict(dict)  # saved within a group while it is recomputed
        column = self._milp.column
        self._groups: dict[str, Terms] = {  # 1 where recomputed
            name: {} if group.recomputed is False else {ONE if group.recomputed else column(whole=True): 1.0}
            for name, group in problem.groups.items()
        }
        self._columns: list[dict[int, int]] = [  # column by option; an option without a rival is certain
            {index: column(whole=True) if len(indices) > 1 else ONE for index in indices}
            for indices in options
        ]
        self._add_nodes()
        for use, readers, group in problem.read():
            self._add_use(use, readers, group)
        self._add_peaks()
        add(self._memory, self._milp.largest([self._stash, self._gradients], math.inf))
        add(self._memory, self._milp.largest(self._inner.values(), math.inf))

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of columns and rows."""
        return len(self._milp.lower), len(self._milp.rows)

    def limit_memory(self, memory_limit: float) -> None:
        """Limits the memory of the choice to ``memory_limit`` bytes."""
        self._milp.at_least({ONE: memory_limit / self._unit}, self._memory)

    def fastest(self, gap: float, time_limit: float) -> Solution:
        """The choice with the shortest time."""
        return self._milp.solve(self._seconds, gap, time_limit)

    def smallest(self, gap: float, time_limit: float) -> Solution:
        """The choice with the least memory. Objective and bound are in bytes."""
        solution = self._milp.solve(self._memory, gap, time_limit)
        return solution._replace(objective=solution.objective * self._unit, bound=solution.bound * self._unit)

    def choices(self, solution: Solution) -> tuple[tuple[int, ...], frozenset[str]]:
        """The option of each node, and the groups that are recomputed."""
        values = solution.values
        indices = (max(columns, key=lambda index: values[columns[index]]) for columns in self._columns)
        return tuple(indices), frozenset(
            name for name, terms in self._groups.items() if any(values[column] > 0.5 for column in terms)
        )

    def _add_nodes(self) -> None:
        for node, columns in zip(self._problem.nodes, self._columns, strict=True):
            if len(columns) > 1:  # exactly one option is chosen
                self._milp.at_least(dict.fromkeys(columns.values(), 1.0), {ONE: 1.0}, equal=True)
            for index, column in columns.items():
                option = node.options[index]
                add(self._memory, {column: option.resident / self._unit})
                add(self._gradients, {column: option.gradients / self._unit})
                if option.saved:
                    self._add_held_bytes({column: 1.0}, option.saved / self._unit, node.group)
                self._charge_seconds({column: 1.0}, option.seconds, option.forward_seconds, node.group)

    def _add_use(self, use: Use, readers: Sequence[UseReader], group: str) -> None:
        sources = self._label_sums(use.node, use.label)
        demands: dict[Label, list[Terms]] = defaultdict(list)
        saves: dict[Label, list[Terms]] = defaultdict(list)
        for reader in readers:
            for label, terms in self._label_sums(reader.node, reader.label).items():
                demands[label].append(terms)
                if self._problem.saves(reader):
                    saves[label].append(terms)
        needs = {label: self._milp.largest(terms) for label, terms in demands.items()}
        self._charge_conversions(use, sources, needs, "" if use.enters else group, shared=len(readers) > 1)
        for label, terms in needs.items():
            size = use.count * use.saved.get(label, 0.0) / self._unit
            saved_max = self._milp.largest(saves[label])
            if not size:
                continue
            if use.enters:  # held if a reader saves it or the group is recomputed
                add(self._stash, self._milp.largest([saved_max, self._recomputed_terms(terms, group)]), size)
            else:
                self._add_held_bytes(saved_max, size, group)

    def _add_held_bytes(self, terms: Terms, size: float, group: str) -> None:
        again = self._recomputed_terms(terms, group) if terms else {}
        add(self._stash, terms, size)
        add(self._stash, again, -size)  # not until the backward pass where the group is recomputed
        if again:
            add(self._inner[group], again, size / self._problem.groups[group].count)  # one instance

    def _label_sums(self, node: int, label: Callable[[Option], Label]) -> dict[Label, Terms]:
        sums: dict[Label, Terms] = defaultdict(dict)
        for index, column in self._columns[node].items():
            sums[label(self._problem.nodes[node].options[index])][column] = 1.0  # 1 for the chosen label
        return sums

    def _charge_conversions(
        self,
        use: Use,
        sources: Mapping[Label, Terms],
        needs: Mapping[Label, Terms],
        group: str,
        *,
        shared: bool,
    ) -> None:
        leaving: dict[Label, Terms] = defaultdict(dict)  # flows by the label that they start from
        for target, terms in needs.items():
            ways = {
                source: use.conversions[source, target]
                for source in sources
                if (source, target) in use.conversions
            }
            costs = {(way.seconds, way.forward_seconds, way.copy_bytes) for way in ways.values()}
            if len(ways) == len(sources) and len(costs) == 1:  # one cost from every label
                columns = [(terms, *costs.pop())]
            else:
                split = {source: self._milp.column() for source in ways}  # the flow from each label
                self._milp.at_least(dict.fromkeys(split.values(), 1.0), terms, equal=True)
                columns = [
                    ({split[source]: 1.0}, way.seconds, way.forward_seconds, way.copy_bytes)
                    for source, way in ways.items()
                ]
                for source, column in split.items():
                    leaving[source][column] = 1.0
            for flow, seconds, forward_seconds, num_bytes in columns:
                self._charge_seconds(flow, use.count * seconds, use.count * forward_seconds, group)
                if num_bytes:
                    self._add_held_bytes(flow, use.count * num_bytes / self._unit, group)
        # A single reader needs one label: flows from a source are then bounded together, which is tighter.
        for source, columns_of in leaving.items():
            for part in [{column: 1.0} for column in columns_of] if shared else [columns_of]:
                self._milp.at_least(sources[source], part)

    def _add_peaks(self) -> None:
        # The two largest add up to the least of 2 t + sum(max(0, peak - t)), where t is the second largest.
        nodes = list(zip(self._problem.nodes, self._columns, strict=True))
        peaks = [[node.options[index].transient / self._unit for index in columns] for node, columns in nodes]
        times = [min(2, node.count) for node, _ in nodes]  # how often a node may be among the two
        certain = chain.from_iterable(
            repeat(min(sizes), number) for sizes, number in zip(peaks, times, strict=True)
        )
        floor = [*nlargest(2, certain), 0.0, 0.0][1]  # t is at least this, whatever is chosen
        bound = {self._milp.column(lower=floor, upper=math.inf): 1.0}
        add(self._memory, bound, 2.0)
        for (_, columns), sizes, number in zip(nodes, peaks, times, strict=True):
            if max(sizes) > floor:
                excess = {self._milp.column(upper=math.inf): 1.0}
                peak: Terms = {}
                for column, size in zip(columns.values(), sizes, strict=True):
                    add(peak, {column: size})
                add(self._memory, excess, number)
                self._milp.at_least({**bound, **excess}, peak)

    def _charge_seconds(self, terms: Terms, seconds: float, forward_seconds: float, group: str) -> None:
        add(self._seconds, terms, seconds)
        if forward_seconds and group:  # paid again where the group is recomputed
            add(self._seconds, self._recomputed_terms(terms, group), forward_seconds)

    def _recomputed_terms(self, terms: Terms, group: str) -> Terms:
        group_terms = self._groups[group] if group else {}
        if not group_terms or ONE in group_terms:  # never, or always
            return terms if group_terms else {}
        return group_terms if terms == {ONE: 1.0} else self._milp.product(terms, group_terms)
