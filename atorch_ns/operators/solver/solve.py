"""Solver of division problems: the fastest options within a memory limit, by a mixed-integer program.

A plan is priced again from scratch before it is returned, and compared with the sums of the solver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, repeat
from operator import le
from typing import Literal

from atorch_ns.errors import InputError
from atorch_ns.operators.solver.problem import Label, Option, PlacementProblem, Price, price
from atorch_ns.operators.solver.program import Options, Program
from atorch_ns.text import bytes_text, first_few, seconds_text

_TOLERANCE = 1e-5  # relative error of the solver's sums, whose columns may be 1e-6 from whole


@dataclass(frozen=True, kw_only=True)
class SolvedProblem:
    """A solved problem.

    Attributes:
        choices: index of the chosen option, by node.
        recomputed: the groups that are recomputed.
        bound: lower bound of the seconds of any choice.
        gap: upper bound of the share of the seconds that the best choice could save.
        status: ``"time limit"`` if the search ended before it reached the demanded gap.
        num_columns, num_rows: the size of the program.
    """

    choices: tuple[int, ...]
    recomputed: frozenset[str]
    price: Price
    bound: float
    gap: float
    status: Literal["optimal", "time limit"]
    num_columns: int
    num_rows: int


def solve(
    problem: PlacementProblem,
    *,
    memory_limit: float | None = None,
    gap: float = 1e-6,
    time_limit: float = 60.0,
) -> SolvedProblem:
    """The fastest choice within a memory limit.

    Args:
        memory_limit: limit of :attr:`Price.memory` in bytes, kept to within 0.001 %; ``None`` for no limit.
        gap: the relative gap between the choice and the bound at which the search ends.
        time_limit: seconds after which the search ends with the best choice found.

    Raises:
        InputError: if no choice has possible conversions, fits in memory, or was found in time.
    """
    options = _possible_options(problem, memory=memory_limit is not None)
    if memory_limit is not None:
        parts = _least_parts(problem, options)  # a bound without a search
        least = sum(parts.values())
        if least > memory_limit * (1 + _TOLERANCE):
            raise _too_large(f"at least {bytes_text(least)} are needed", memory_limit, parts)
    program = Program(problem, options, memory_limit or 1.0)  # memory in units of the limit
    if memory_limit is not None:
        program.limit_memory(memory_limit)
    solution = program.fastest(gap, time_limit)
    if solution.status == "infeasible":
        raise _none_fits(problem, options, memory_limit, time_limit)
    if not solution.values:
        raise InputError(
            f"no division was found within {seconds_text(time_limit)}. Allow more time, or a higher memory limit."
        )
    choices, groups = program.choices(solution)
    cost = price(problem, choices, groups)
    work = cost.compute_seconds + cost.conversion_seconds  # the objective knows nothing of the host
    slack = _TOLERANCE * max(abs(solution.objective), work)
    assert solution.bound - slack <= work <= solution.objective + slack, (cost, solution.objective)
    assert memory_limit is None or cost.memory <= memory_limit * (1 + _TOLERANCE), (cost, memory_limit)
    # The solver's tolerance may lift its bound above the choice.
    bound = max(min(solution.bound, work), problem.host_seconds)
    return SolvedProblem(
        choices=choices,
        recomputed=groups,
        price=cost,
        bound=bound,
        gap=(cost.seconds - bound) / cost.seconds if cost.seconds else 0.0,
        status="optimal" if solution.status == "optimal" else "time limit",
        num_columns=program.size[0],
        num_rows=program.size[1],
    )


def _possible_options(problem: PlacementProblem, *, memory: bool) -> list[list[int]]:
    # Leaves out options that another one dominates, and those that no conversion joins to a neighbour.
    options = [_undominated_options(node.options, memory=memory) for node in problem.nodes]
    nodes, has_changed = problem.nodes, True

    def labels(node: int, label: Callable[[Option], Label]) -> set[Label]:
        return {label(nodes[node].options[index]) for index in options[node]}

    def restrict(node: int, label: Callable[[Option], Label], legal_labels: set[Label], other: int) -> bool:
        indices = [index for index in options[node] if label(nodes[node].options[index]) in legal_labels]
        if not indices:
            raise InputError(
                f"{nodes[node].name} cannot be joined to {nodes[other].name}: no conversion turns any placement of "
                f"the value between them into the needed one. Allow more options for one of the two."
            )
        shorter = len(indices) < len(options[node])
        options[node] = indices
        return shorter

    while has_changed:  # a removed option may have been the last partner of others
        has_changed = False
        for use, readers, _ in problem.read():
            for reader in readers:
                sources, targets = labels(use.node, use.label), labels(reader.node, reader.label)
                pairs = [pair for pair in use.conversions if pair[0] in sources and pair[1] in targets]
                has_changed |= restrict(use.node, use.label, {source for source, _ in pairs}, reader.node)
                has_changed |= restrict(reader.node, reader.label, {target for _, target in pairs}, use.node)
    return options


def _undominated_options(options: Sequence[Option], *, memory: bool) -> list[int]:
    def costs(option: Option) -> tuple[float, ...]:
        num_bytes = (option.resident, option.gradients, option.saved, option.transient)
        return option.seconds, option.forward_seconds, *(num_bytes if memory else ())

    alike: dict[object, list[int]] = defaultdict(list)  # the undominated so far, by their labels
    # Sorted by costs, an option comes after all that dominate it.
    for index in sorted(range(len(options)), key=lambda index: costs(options[index])):
        rivals = alike[options[index].outputs, options[index].needs]
        cost = costs(options[index])
        if not any(all(map(le, costs(options[rival]), cost)) for rival in rivals):
            rivals.append(index)
    return sorted(chain.from_iterable(alike.values()))


def _least_parts(problem: PlacementProblem, options: Options) -> dict[str, float]:
    parts: dict[str, float] = defaultdict(float)  # bytes that every choice needs, by what needs them
    peaks: list[float] = []
    for node, indices in zip(problem.nodes, options, strict=True):
        parts[f"states of {node.name}"] += min(node.options[index].resident for index in indices)
        if not node.group or problem.groups[node.group].recomputed is False:
            parts[f"masks of {node.name}"] += min(node.options[index].saved for index in indices)
        peaks += repeat(min(node.options[index].transient for index in indices), min(2, node.count))
    parts["the two largest peaks inside operators"] = sum(nlargest(2, peaks))
    for use, readers, group in problem.read():
        again = problem.groups[group].recomputed if group else False
        if again is not False and not use.enters:  # it is recomputed, or may be
            continue
        parts[f"saved results of {problem.nodes[use.node].name}"] += use.count * max(
            (
                min(
                    use.saved.get(reader.label(problem.nodes[reader.node].options[index]), 0.0)
                    for index in options[reader.node]
                )
                for reader in readers
                if again or problem.saves(reader)
            ),
            default=0.0,
        )
    return parts


def _none_fits(
    problem: PlacementProblem, options: Options, memory_limit: float | None, time_limit: float
) -> InputError:
    program = Program(problem, options, memory_limit or 1.0)
    solution = program.smallest(0.0, time_limit)  # its least memory is the proof
    if memory_limit is None or solution.status == "infeasible":
        return InputError(
            "no choice of options can be joined by conversions. Allow more options, such as the one that divides nothing."
        )
    if not solution.values:
        return _too_large("the search has shown it", memory_limit, _least_parts(problem, options))
    choices, _ = program.choices(solution)
    proof = f"the division that needs the least needs {bytes_text(solution.objective)}"
    return _too_large(proof, memory_limit, _least_parts(problem, [[choice] for choice in choices]))


def _too_large(proof: str, memory_limit: float, parts: Mapping[str, float]) -> InputError:
    largest = sorted(parts.items(), key=lambda part: -part[1])
    texts = [f"{name} ({bytes_text(size)})" for name, size in largest if size > 0]
    return InputError(
        f"no division fits in {bytes_text(memory_limit)} of memory: {proof}. The largest parts are "
        f"{first_few(texts)}. Use more devices, a smaller micro-batch, recomputation, or a higher limit."
    )
