"""Choice of an operator plan, given or found by a policy, with the predicted costs of its operators."""

from __future__ import annotations

import json
import random
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from atorch_ns.capture.graph.operator_graph import Operator, OperatorGraph
from atorch_ns.errors import InputError
from atorch_ns.operators.divided.divide import OperatorDivision
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.rules.constraints import Constraint, allowed_rules, read_constraints, unused_warnings
from atorch_ns.operators.rules.custom import registered_rules
from atorch_ns.operators.rules.rule import WHOLE, Placement, Rule, whole_rule
from atorch_ns.operators.rules.table import rules_of
from atorch_ns.operators.solver.assemble import Assembled, LegalRules, States, assemble
from atorch_ns.operators.solver.prices import OperatorPrices
from atorch_ns.operators.solver.problem import shared_conversions
from atorch_ns.operators.solver.solve import SolvedProblem, solve
from atorch_ns.text import bytes_text, percent_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class OperatorPrice:
    """Predicted cost of all operators with one key in a training step, on one rank.

    Attributes:
        key, division: as in the plan; whole operators have an empty division.
        count: number of the operators.
        seconds: compute time.
        conversion_seconds, bytes_moved: time to convert their arguments, and bytes of the exchanged values.
    """

    key: str
    count: int
    division: str
    seconds: float
    conversion_seconds: float
    bytes_moved: float

    @property
    def total(self) -> float:
        """Compute and conversion time, in seconds."""
        return self.seconds + self.conversion_seconds


def operator_costs(assembly: Assembled, plan: OperatorPlan) -> list[OperatorPrice]:
    """The predicted costs of a plan's operators, the slowest first."""
    problem, choices = assembly.problem, assembly.choices(plan)
    options = [node.options[choice] for node, choice in zip(problem.nodes, choices, strict=True)]
    conversion_seconds: dict[int, float] = defaultdict(float)  # by index of the node, as below
    bytes_moved: dict[int, float] = defaultdict(float)
    for use, readers, _ in problem.read():
        for reader, conversion in shared_conversions(problem, use, readers, options).items():
            conversion_seconds[reader.node] += use.count * conversion.seconds
            bytes_moved[reader.node] += use.count * conversion.bytes_moved
    costs = [
        OperatorPrice(
            key=node.name,
            count=node.count,
            division=str(rules[choice]) if rules and rules[choice].divides else "",
            seconds=option.seconds,
            conversion_seconds=conversion_seconds[number],
            bytes_moved=bytes_moved[number],
        )
        for number, (node, option, rules, choice) in enumerate(
            zip(problem.nodes, options, assembly.rules, choices, strict=True)
        )
    ]
    return sorted((entry for entry in costs if entry.total), key=lambda entry: -entry.total)


def costs_text(costs: Sequence[OperatorPrice], *, top: int = 10) -> str:
    """A table of the slowest operators, with their share of the total time."""
    total = sum(cost.total for cost in costs) or 1.0

    def sums(entries: Sequence[OperatorPrice]) -> tuple[str, ...]:
        return (
            seconds_text(sum(entry.seconds for entry in entries)),
            seconds_text(sum(entry.conversion_seconds for entry in entries)),
            bytes_text(sum(entry.bytes_moved for entry in entries)),
            f"{sum(entry.total for entry in entries) / total:.1%}",
        )

    rows: list[tuple[str, ...]] = [
        ("operator", "×", "division", "computes", "converts", "exchanges", "share"),
        *((cost.key, str(cost.count), cost.division or "whole", *sums([cost])) for cost in costs[:top]),
    ]
    if len(costs) > top:
        rows.append((f"{len(costs) - top} more", "", "", *sums(costs[top:])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


Allow = Callable[[Operator, tuple[Rule, ...]], tuple[Rule, ...]]
"""Filters an operator's rules by the user's constraints."""


def legal_rules(graph: OperatorGraph, degree: int, allow: Allow | None = None) -> LegalRules:
    """The rules by which each operator may be divided over ``degree`` ranks."""
    cache: dict[object, tuple[Rule, ...]] = {}  # rules of equal calls are looked up once
    result: dict[str, tuple[Rule, ...]] = {}
    for key, operators in graph.by_key.items():
        legal: tuple[Rule, ...] | None = None
        for op in operators:
            rules = (whole_rule(op.call),) if graph.is_between(op) else _operator_rules(op, degree, cache)
            if allow is not None:
                rules = allow(op, rules)
            legal = rules if legal is None else tuple(rule for rule in legal if rule in rules)
        result[key] = legal or (whole_rule(operators[0].call),)  # blocks may have none in common
    return result


def _operator_rules(op: Operator, degree: int, cache: dict[object, tuple[Rule, ...]]) -> tuple[Rule, ...]:
    if op.pinned:  # shares memory with what is written to
        return (whole_rule(op.call),)
    likeness = (op.call.name, repr(op.call.args), repr(op.call.kwargs), op.call.outputs)
    if likeness not in cache:
        cache[likeness] = rules_of(op.call, degree, registered_rules)
    return cache[likeness]


def parameter_placements(
    graph: OperatorGraph, rules: Mapping[str, Rule], degree: int
) -> dict[str, Placement]:
    """The best placement of each parameter, by key: sharded if all of its uses need the same shard."""
    needs: dict[str, set[Placement]] = {}
    sizes: dict[str, Sequence[int]] = {}
    for op in graph.operators:
        rule = rules.get(op.key, whole_rule(op.call))
        for value, placement in zip(op.inputs, rule.inputs, strict=True):
            origin = graph.origins.get(value)
            if origin is not None and origin.kind == "parameter":
                key = graph.parameter_key(value)
                needs.setdefault(key, set()).add(placement)
                sizes[key] = value.meta["val"].shape
    return {
        key: placement
        for key, (placement, *others) in ((key, list(placements)) for key, placements in needs.items())
        if not others and isinstance(placement, Shard) and sizes[key][placement.dim] % degree == 0
    }


def planned(
    graph: OperatorGraph, degree: int, choose: Callable[[str, Sequence[Rule]], Rule], note: str = ""
) -> OperatorPlan:
    """The plan in which ``choose`` picks one of the legal rules of each key."""
    rules = {key: choose(key, legal) for key, legal in legal_rules(graph, degree).items()}
    dividing_rules = {key: rule for key, rule in rules.items() if rule.divides}
    parameters = parameter_placements(graph, rules, degree)
    return OperatorPlan(operators=dividing_rules, parameters=parameters, degree=degree, note=note)


def random_plan(graph: OperatorGraph, degree: int, seed: int) -> OperatorPlan:
    """A plan with a random legal rule for every operator, the same for the same seed."""
    chance = random.Random(seed)
    return planned(graph, degree, lambda _, legal: chance.choice(legal), f"random, seed {seed}")


def batch_plan(graph: OperatorGraph, degree: int) -> OperatorPlan:
    """A plan that divides only the samples, wherever they can be followed."""

    def choose(key: str, legal: Sequence[Rule]) -> Rule:
        (op, *_) = graph.by_key[key]
        dims = [_batch_dim(node) for node in (*op.results, *op.inputs) if node is not None]
        return next((rule for rule in legal if rule.divides and _divides_samples(rule, op, dims)), legal[0])

    return planned(graph, degree, choose, "the batch")


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The fastest plan that was found, with a bound on how much faster any other could be.

    Attributes:
        outcome: predicted seconds and bytes, and the bound that no plan is faster than.
        costs: costs of its operators, the slowest first.
    """

    plan: OperatorPlan
    outcome: SolvedProblem
    costs: Sequence[OperatorPrice]

    @property
    def text(self) -> str:
        """The prediction, in two sentences."""
        price = self.outcome.price
        return (
            f"{seconds_text(price.seconds)} a step of forward and backward pass, of them "
            f"{seconds_text(price.conversion_seconds)} of collectives; {bytes_text(price.memory)} a rank (predicted). "
            f"No plan is more than {percent_text(self.outcome.gap)} faster by the same figures."
        )


def solved_plan(
    graph: OperatorGraph,
    degree: int,
    prices: OperatorPrices,
    states: States,
    *,
    device: torch.device,
    memory_limit: float | None = None,
    recomputed: bool = False,
    allow: Allow | None = None,
) -> Solved:
    """The plan with the lowest predicted step time within a memory limit.

    Args:
        memory_limit: bytes on one rank.
        recomputed: whether blocks are recomputed in the backward pass.

    Raises:
        InputError: if no plan fits. The message names the largest consumers of memory.
    """
    legal = legal_rules(graph, degree, allow)
    problem = assemble(graph, legal, prices, states, device=device, recomputed=recomputed)
    outcome = solve(problem.problem, memory_limit=memory_limit, gap=_GAP, time_limit=_SECONDS)
    plan = problem.plan(outcome, degree)
    return Solved(plan=plan, outcome=outcome, costs=operator_costs(problem, plan))


_GAP = 1e-3  # relative: plans this close count as equal, since predictions are no more accurate

_SECONDS = 10.0  # time limit of a search


def _batch_dim(node: fx.Node) -> int | None:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    # A size that is a symbol follows the number of samples.
    return next((dim for dim, size in enumerate(value.shape) if not isinstance(size, int)), None)


def _divides_samples(rule: Rule, op: Operator, dims: Sequence[int | None]) -> bool:
    results = [node for node in op.results if node is not None]
    placements = [rule.outputs[op.results.index(node)] for node in results] + list(rule.inputs)
    return any(dim is not None for dim in dims) and all(
        placement == Shard(dim) if dim is not None else not isinstance(placement, Shard)
        for placement, dim in zip(placements, dims, strict=True)
    )


def refit_plan(
    plan: OperatorPlan,
    graph: OperatorGraph,
    degree: int,
    prices: OperatorPrices,
    *,
    device: torch.device,
    allow: Allow | None = None,
) -> OperatorPlan:
    """The fastest plan for a call that ``plan`` does not fit. Parameters keep the placements of ``plan``."""
    problem = assemble(
        graph, legal_rules(graph, degree, allow), prices, States(), device=device, stored=plan.parameters
    )
    return problem.plan(solve(problem.problem, gap=_GAP, time_limit=_SECONDS), degree)


def division_of(
    plan: OperatorPlan, graph: OperatorGraph, degree: int, summed: frozenset[str] | None = None
) -> OperatorDivision:
    """The rules that a plan gives to a graph's operators. Operators that it does not name stay whole.

    Args:
        summed: parameters whose gradients are summed after the backward pass; by default those partly used.

    Raises:
        InputError: if the plan is for another number of ranks, or a rule is not legal for its operator.
    """
    if plan.degree not in (None, degree):
        raise InputError(f"the operator plan was made for {plan.degree} ranks, but there are {degree}.")
    legal = legal_rules(graph, degree)
    illegal = {
        key: plan.operators[key]
        for key in legal
        if key in plan.operators and plan.operators[key] not in legal[key]
    }
    if illegal:
        keys = [*graph.by_key, *{graph.parameter_key(node) for node in graph.origins}]
        raise InputError(
            f"the operator plan divides operators of this model in ways they do not allow:\n{plan.misfit(keys, legal)}"
        )
    rules = {}
    for op in graph.operators:
        plan_rule = plan.operators.get(op.key)
        if plan_rule is None:
            rules[op] = whole_rule(op.call)
        else:  # the legal rule has a kernel, unlike the plan's
            rules[op] = next(rule for rule in legal[op.key] if rule == plan_rule)
    shards = {
        origin.name: placement
        for node, origin in graph.origins.items()
        if origin.kind == "parameter"
        and not isinstance(placement := plan.parameters.get(graph.parameter_key(node), WHOLE), Replicate)
    }
    division = OperatorDivision(graph, degree, rules, shards)
    return replace(division, summed=division.partly_used() if summed is None else summed)


def check_plan(plan: OperatorPlan, graph: OperatorGraph, degree: int) -> None:
    """Raises an :class:`InputError` if a plan has a key that the model lacks, or an impossible placement."""
    sizes = {
        graph.parameter_key(n): n.meta["val"].shape for n, o in graph.origins.items() if o.kind == "parameter"
    }
    misfit = plan.misfit([*graph.by_key, *sizes], legal_rules(graph, degree))
    for key, placement in plan.parameters.items():
        shape = sizes.get(key)
        if shape is None or not isinstance(placement, Shard):
            continue
        if placement.dim >= len(shape) or shape[placement.dim] % degree:
            misfit += f"\n{key}: {list(shape)} is not divided along {placement.dim} by {degree} ranks."
    if misfit:
        raise InputError(f"the operator plan does not fit this model:\n{misfit.strip()}")


Policy = Literal["solve", "batch", "random"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The request for a plan.

    Attributes:
        plan: path of a plan's file, or the contents of one; ``None`` to find one.
        policy: how to find one: the fastest that fits in memory, samples divided, or random legal rules.
        seed: seed for the policy ``random``.
        constraints: path of a YAML file in nnScaler's form.
        memory_bytes: memory limit of a rank for the policy ``solve``; ``None`` for the device's memory.
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
        note: the plan's origin and predicted cost.
        warnings: warnings about constraints that match no operator.
    """

    plan: OperatorPlan
    note: str
    warnings: tuple[str, ...] = ()


def find_plan(
    graph: OperatorGraph,
    degree: int,
    request: Wanted,
    prices: OperatorPrices,
    *,
    states: States,
    device: torch.device,
) -> FoundPlan:
    """The requested plan.

    Raises:
        InputError: if a given one does not fit the graph, or none fits the memory.
    """
    if request.plan is not None:
        user_plan = _read_plan(request.plan)
        if user_plan.degree in (None, degree):  # other degrees are reported where the plan is used
            check_plan(user_plan, graph, degree)
        return FoundPlan(plan=user_plan, note="the plan given")
    if request.policy != "solve":
        is_random = request.policy == "random"
        plan = random_plan(graph, degree, request.seed) if is_random else batch_plan(graph, degree)
        return FoundPlan(plan=plan, note=f"the plan of the policy {request.policy}")
    constraints = read_constraints(request.constraints) if request.constraints else ()
    solution = solved_plan(
        graph,
        degree,
        prices,
        states,
        device=device,
        memory_limit=request.memory_bytes or float(prices.device.memory_bytes) or None,
        recomputed=request.recomputed,
        allow=allowed_by(constraints),
    )
    calls = [(op.call.name, (op.path, op.classes)) for op in graph.operators]
    return FoundPlan(
        plan=solution.plan,
        note=f"found: {solution.text} Figures of the device: {prices.device.source}. The longest operators:\n"
        f"{textwrap.indent(costs_text(solution.costs, top=5), '    ')}",
        warnings=tuple(unused_warnings(calls, constraints)),
    )


def allowed_by(constraints: Sequence[Constraint]) -> Allow:
    """A filter that keeps the rules of an operator that the constraints allow."""

    def allow(op: Operator, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return allowed_rules(rules, op.call.name, (op.path, op.classes), constraints)

    return allow


def _read_plan(plan: Mapping[str, Any] | str) -> OperatorPlan:
    if isinstance(plan, str):
        return OperatorPlan.read(plan)
    return OperatorPlan.from_text(json.dumps(plan), source="in the strategy")
