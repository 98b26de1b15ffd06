"""Analysis of an operator plan: what each operator and its conversions take, as rows and as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.solver.assemble import Assembled
from atorch_ns.text import bytes_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """What the operators of one key take in a training step, together and on one rank; predicted.

    Attributes:
        key: as in the plan.
        count: how many they are.
        division: the rule, as in the plan; empty for whole.
        seconds: of computing.
        conversion_seconds: of bringing what they read to where they need it.
        bytes_moved: of that, in bytes of the whole values that collectives exchange.
    """

    key: str
    count: int
    division: str
    seconds: float
    conversion_seconds: float
    bytes_moved: float

    @property
    def total(self) -> float:
        """Seconds of computing and converting."""
        return self.seconds + self.conversion_seconds


def operator_costs(assembled: Assembled, plan: OperatorPlan) -> list[OperatorCost]:
    """The operators of a plan, the longest first."""
    problem, choices = assembled.problem, assembled.choices(plan)
    options = [node.options[choice] for node, choice in zip(problem.nodes, choices, strict=True)]
    moved: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for use, readers, _ in problem.read():
        label = use.label(options[use.node])
        for needed, reader in {one.label(options[one.node]): one for one in readers}.items():
            conversion = use.conversions[label, needed]
            moved[reader.node][0] += use.count * conversion.seconds
            moved[reader.node][1] += use.count * conversion.bytes_moved
    found = [
        OperatorCost(
            key=node.name,
            count=node.count,
            division=str(rules[choice]) if rules and rules[choice].divides else "",
            seconds=option.seconds,
            conversion_seconds=moved[number][0],
            bytes_moved=moved[number][1],
        )
        for number, (node, option, rules, choice) in enumerate(
            zip(problem.nodes, options, assembled.rules, choices, strict=True)
        )
    ]
    return sorted((one for one in found if one.total), key=lambda one: -one.total)


def costs_text(costs: Sequence[OperatorCost], *, top: int = 10) -> str:
    """A table of the longest operators, with the share that they take of all."""
    total = sum(one.total for one in costs) or 1.0
    shown = costs[:top]
    rows = [("operator", "×", "division", "computes", "converts", "exchanges", "share")]
    rows += [
        (
            one.key,
            str(one.count),
            one.division or "whole",
            seconds_text(one.seconds),
            seconds_text(one.conversion_seconds),
            bytes_text(one.bytes_moved),
            f"{one.total / total:.1%}",
        )
        for one in shown
    ]
    if len(costs) > top:
        rest = costs[top:]
        rows.append(
            (
                f"{len(rest)} more",
                "",
                "",
                seconds_text(sum(one.seconds for one in rest)),
                seconds_text(sum(one.conversion_seconds for one in rest)),
                bytes_text(sum(one.bytes_moved for one in rest)),
                f"{sum(one.total for one in rest) / total:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
