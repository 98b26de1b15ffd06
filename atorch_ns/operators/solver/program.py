"""A division problem as a mixed-integer program.

Every option of a node is a column that is 0 or 1; the label of a value is the sum of its producer's options. A use needs a
label as much as the reader that needs it most. That need is split into one column for each conversion that leads to the
label, each of which is at most the label that it starts from. The relaxation of this form is tight, so that HiGHS rarely
branches. A column is left out where a sum of others takes its place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from itertools import chain, repeat

from atorch_ns.operators.solver.milp import ONE, Milp, Solution, Terms, add
from atorch_ns.operators.solver.problem import Label, Option, Problem, Reader, Use

Options = Sequence[Sequence[int]]
"""The indices of the options that may be chosen, by node."""


class Program:
    """The program of a problem.

    Args:
        options: the options that may be chosen; conversions lead from and to all of them.
        memory_unit: bytes that are written as 1.
    """

    def __init__(self, problem: Problem, options: Options, memory_unit: float = 1.0) -> None:
        self._problem = problem
        self._options = options
        self._unit = memory_unit
        self._milp = Milp()
        self._seconds: Terms = {}
        self._memory: Terms = {}
        self._saved: Terms = {}
        self._gradients: Terms = {}
        self._inner: dict[str, Terms] = defaultdict(dict)
        column = self._milp.column
        self._groups: dict[str, Terms] = {
            name: {} if group.recomputed is False else {ONE if group.recomputed else column(whole=True): 1.0}
            for name, group in problem.groups.items()
        }
        self._chosen: list[dict[int, int]] = [
            {index: column(whole=True) if len(own) > 1 else ONE for index in own} for own in options
        ]
        self._add_nodes()
        for use, readers, group in problem.read():
            self._add_use(use, readers, group)
        self._add_peaks()
        add(self._memory, self._milp.largest([self._saved, self._gradients], math.inf))
        add(self._memory, self._milp.largest(self._inner.values(), math.inf))

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of columns and rows."""
        return len(self._milp.lower), len(self._milp.rows)

    def limit_memory(self, memory_limit: float) -> None:
        """Demands that the choice needs at most so many bytes."""
        self._milp.at_least({ONE: memory_limit / self._unit}, self._memory)

    def fastest(self, gap: float, time_limit: float) -> Solution:
        """The choice that takes the fewest seconds."""
        return self._milp.solve(self._seconds, gap, time_limit)

    def smallest(self, gap: float, time_limit: float) -> Solution:
        """The choice that needs the least memory; objective and bound are in bytes."""
        found = self._milp.solve(self._memory, gap, time_limit)
        return found._replace(objective=found.objective * self._unit, bound=found.bound * self._unit)

    def choices(self, solution: Solution) -> tuple[tuple[int, ...], frozenset[str]]:
        """The option of each node, and the groups that are recomputed."""
        values = solution.values
        chosen = (max(columns, key=lambda index: values[columns[index]]) for columns in self._chosen)
        return tuple(chosen), frozenset(
            name for name, terms in self._groups.items() if any(values[column] > 0.5 for column in terms)
        )

    def _add_nodes(self) -> None:
        for node, columns in zip(self._problem.nodes, self._chosen, strict=True):
            if len(columns) > 1:
                self._milp.at_least(dict.fromkeys(columns.values(), 1.0), {ONE: 1.0}, equal=True)
            for index, column in columns.items():
                option = node.options[index]
                add(self._memory, {column: option.resident / self._unit})
                add(self._gradients, {column: option.gradients / self._unit})
                self._charge({column: 1.0}, option.seconds, option.forward_seconds, node.group)

    def _add_use(self, use: Use, readers: Sequence[Reader], group: str) -> None:
        given = self._labels(use.node, use.label)
        wanted: dict[Label, list[Terms]] = defaultdict(list)
        saved: dict[Label, list[Terms]] = defaultdict(list)
        for reader in readers:
            for label, terms in self._labels(reader.node, reader.label).items():
                wanted[label].append(terms)
                if self._problem.saves(reader):
                    saved[label].append(terms)
        needed = {label: self._milp.largest(terms) for label, terms in wanted.items()}
        self._convert(use, given, needed, "" if use.enters else group, shared=len(readers) > 1)
        for label, terms in needed.items():
            size = use.count * use.saved.get(label, 0.0) / self._unit
            held = self._milp.largest(saved[label])
            if not size:
                continue
            if use.enters:
                add(self._saved, self._milp.largest([held, self._again(terms, group)]), size)
            else:
                self._hold(held, size, group)

    def _hold(self, terms: Terms, size: float, group: str) -> None:
        """Holds bytes wherever a sum is 1: until the backward pass, or while the group is recomputed."""
        again = self._again(terms, group) if terms else {}
        add(self._saved, terms, size)
        add(self._saved, again, -size)
        if again:
            add(self._inner[group], again, size / self._problem.groups[group].count)

    def _labels(self, node: int, label: Callable[[Option], Label]) -> dict[Label, Terms]:
        """The sum of the options of each label; it is 1 for the label that is chosen."""
        found: dict[Label, Terms] = defaultdict(dict)
        for index, column in self._chosen[node].items():
            found[label(self._problem.nodes[node].options[index])][column] = 1.0
        return found

    def _convert(
        self,
        use: Use,
        given: Mapping[Label, Terms],
        needed: Mapping[Label, Terms],
        group: str,
        *,
        shared: bool,
    ) -> None:
        """Pays for the conversions from the label given to every label needed."""
        leaving: dict[Label, Terms] = defaultdict(dict)
        for target, terms in needed.items():
            ways = {
                source: use.conversions[source, target]
                for source in given
                if (source, target) in use.conversions
            }
            costs = {(way.seconds, way.forward_seconds, way.held) for way in ways.values()}
            if len(ways) == len(given) and len(costs) == 1:
                columns = [(terms, *costs.pop())]
            else:
                split = {source: self._milp.column() for source in ways}
                self._milp.at_least(dict.fromkeys(split.values(), 1.0), terms, equal=True)
                columns = [
                    ({split[source]: 1.0}, way.seconds, way.forward_seconds, way.held)
                    for source, way in ways.items()
                ]
                for source, column in split.items():
                    leaving[source][column] = 1.0
            for one, seconds, forward_seconds, held in columns:
                self._charge(one, use.count * seconds, use.count * forward_seconds, group)
                if held:
                    self._hold(one, use.count * held / self._unit, group)
        for source, columns_of in leaving.items():
            for part in [{column: 1.0} for column in columns_of] if shared else [columns_of]:
                self._milp.at_least(given[source], part)

    def _add_peaks(self) -> None:
        """Adds the two largest peaks: twice any bound, and what exceeds it, are least if the bound is the second largest."""
        nodes = list(zip(self._problem.nodes, self._chosen, strict=True))
        peaks = [[node.options[index].transient / self._unit for index in columns] for node, columns in nodes]
        times = [min(2, node.count) for node, _ in nodes]
        certain = chain.from_iterable(
            repeat(min(own), number) for own, number in zip(peaks, times, strict=True)
        )
        floor = [*nlargest(2, certain), 0.0, 0.0][1]
        bound = {self._milp.column(lower=floor, upper=math.inf): 1.0}
        add(self._memory, bound, 2.0)
        for (_, columns), own, number in zip(nodes, peaks, times, strict=True):
            if max(own) > floor:
                excess = {self._milp.column(upper=math.inf): 1.0}
                peak: Terms = {}
                for column, size in zip(columns.values(), own, strict=True):
                    add(peak, {column: size})
                add(self._memory, excess, number)
                self._milp.at_least({**bound, **excess}, peak)

    def _charge(self, terms: Terms, seconds: float, forward_seconds: float, group: str) -> None:
        """Adds seconds wherever a sum is 1, and those of the forward pass again where it is recomputed."""
        add(self._seconds, terms, seconds)
        if forward_seconds and group:
            add(self._seconds, self._again(terms, group), forward_seconds)

    def _again(self, terms: Terms, group: str) -> Terms:
        """A sum that is 1 where another is and the group is recomputed."""
        recomputed = self._groups[group] if group else {}
        if not recomputed or ONE in recomputed:
            return terms if recomputed else {}
        return recomputed if terms == {ONE: 1.0} else self._milp.product(terms, recomputed)
