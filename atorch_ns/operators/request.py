"""Requests for operator plans: a plan that is given, or found by a policy, with what is known of it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from atorch_ns.operators.analysis import costs_text
from atorch_ns.operators.choose import Allow, batch_plan, check_plan, random_plan, solved_plan
from atorch_ns.operators.graph.graph import Operator, OperatorGraph
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.rules.constraints import Constraint, allowed, read_constraints, unused
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.operators.solver.assemble import States
from atorch_ns.operators.solver.prices import Prices

Policy = Literal["solve", "batch", "random"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan is asked for.

    Attributes:
        plan: a plan: a file's path, or what it holds; ``None`` to find one.
        policy: how it is found: the fastest within the memory, the samples divided, or any legal rules.
        seed: of the policy ``random``.
        constraints: path of a YAML file in nnScaler's form.
        memory_bytes: of a rank, for the policy ``solve``; ``None`` for the device's.
        recomputed: whether blocks are recomputed in the backward pass.
    """

    plan: Mapping[str, Any] | str | None = None
    policy: Policy = "solve"
    seed: int = 1
    constraints: str | None = None
    memory_bytes: float | None = None
    recomputed: bool = False


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan that fits its graph.

    Attributes:
        note: where it comes from, and what is predicted of it.
        warnings: constraints that nothing obeys.
    """

    plan: OperatorPlan
    note: str
    warnings: tuple[str, ...] = ()


def find_plan(
    graph: OperatorGraph, degree: int, wanted: Wanted, prices: Prices, states: States, device: torch.device
) -> FoundPlan:
    """The plan that is wanted.

    Raises:
        InputError: if a given one does not fit the graph, or none fits the memory.
    """
    if wanted.plan is not None:
        given = _given(wanted.plan)
        if given.degree in (None, degree):  # what it is for is said where it is used
            check_plan(given, graph, degree)
        return FoundPlan(plan=given, note="the plan given")
    if wanted.policy != "solve":
        made = (
            random_plan(graph, degree, wanted.seed)
            if wanted.policy == "random"
            else batch_plan(graph, degree)
        )
        return FoundPlan(plan=made, note=f"the plan of the policy {wanted.policy}")
    constraints = read_constraints(wanted.constraints) if wanted.constraints else ()
    solved = solved_plan(
        graph,
        degree,
        prices,
        states,
        device,
        memory_limit=wanted.memory_bytes or float(prices.device.memory_bytes) or None,
        recomputed=wanted.recomputed,
        allow=allowed_by(constraints),
    )
    calls = [(one.call.name, (one.path, one.classes)) for one in graph.operators]
    return FoundPlan(
        plan=solved.plan,
        note=f"found: {solved.text} Figures of the device: {prices.device.source}. The longest operators:\n"
        f"{textwrap.indent(costs_text(solved.costs, top=5), '    ')}",
        warnings=tuple(unused(calls, constraints)),
    )


def allowed_by(constraints: Sequence[Constraint]) -> Allow:
    """Leaves of an operator's rules those that constraints allow."""

    def allow(one: Operator, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return allowed(rules, one.call.name, (one.path, one.classes), constraints)

    return allow


def _given(plan: Mapping[str, Any] | str) -> OperatorPlan:
    if isinstance(plan, str):
        return OperatorPlan.read(plan)
    return OperatorPlan.from_text(json.dumps(plan), source="in the strategy")
