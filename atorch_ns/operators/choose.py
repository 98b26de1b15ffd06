"""Choosing rules: those that are legal for a model, plans that divide the batch or anything at random, and plans applied."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from atorch_ns.errors import InputError
from atorch_ns.operators.analysis import OperatorCost, operator_costs
from atorch_ns.operators.divided.divide import Division
from atorch_ns.operators.graph.graph import Operator, OperatorGraph
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.rules.custom import registered_rules
from atorch_ns.operators.rules.rule import Placement, Rule
from atorch_ns.operators.rules.table import rules_of
from atorch_ns.operators.solver.assemble import LegalRules, States, assemble
from atorch_ns.operators.solver.prices import Prices
from atorch_ns.operators.solver.solve import Outcome, solve
from atorch_ns.text import bytes_text, percent_text, seconds_text

Allow = Callable[[Operator, tuple[Rule, ...]], tuple[Rule, ...]]
"""Leaves of an operator's rules those that the user's constraints allow."""


def legal_rules(graph: OperatorGraph, degree: int, allow: Allow | None = None) -> LegalRules:
    """The rules by which each operator may be divided over ``degree`` ranks."""
    known: dict[object, tuple[Rule, ...]] = {}
    found: dict[str, tuple[Rule, ...]] = {}
    for key, operators in graph.by_key.items():
        legal: tuple[Rule, ...] | None = None
        for one in operators:
            rules = (one.call.whole,) if graph.is_between(one) else _rules(one, degree, known)
            if allow is not None:
                rules = allow(one, rules)
            legal = rules if legal is None else tuple(rule for rule in legal if rule in rules)
        found[key] = legal or (operators[0].call.whole,)
    return found


def _rules(one: Operator, degree: int, known: dict[object, tuple[Rule, ...]]) -> tuple[Rule, ...]:
    if one.pinned:
        return (one.call.whole,)
    likeness = (one.call.name, repr(one.call.args), repr(one.call.kwargs), one.call.outputs)
    if likeness not in known:
        known[likeness] = rules_of(one.call, degree, registered_rules)
    return known[likeness]


def parameter_placements(
    graph: OperatorGraph, rules: Mapping[str, Rule], degree: int
) -> dict[str, Placement]:
    """By parameter key where each is best stored: as its uses need it, if they all need it divided alike."""
    needs: dict[str, set[Placement]] = {}
    sizes: dict[str, Sequence[int]] = {}
    for one in graph.operators:
        rule = rules.get(one.key, one.call.whole)
        for value, placement in zip(one.inputs, rule.inputs, strict=True):
            origin = graph.origins.get(value)
            if origin is not None and origin.kind == "parameter":
                key = graph.parameter_key(value)
                needs.setdefault(key, set()).add(placement)
                sizes[key] = value.meta["val"].shape
    return {
        key: placement
        for key, (placement, *others) in ((key, list(found)) for key, found in needs.items())
        if not others and isinstance(placement, Shard) and sizes[key][placement.dim] % degree == 0
    }


def planned(
    graph: OperatorGraph, degree: int, choose: Callable[[str, Sequence[Rule]], Rule], note: str = ""
) -> OperatorPlan:
    """The plan of what ``choose`` takes for each key among its legal rules."""
    rules = {key: choose(key, legal) for key, legal in legal_rules(graph, degree).items()}
    divided = {key: rule for key, rule in rules.items() if rule.divides}
    parameters = parameter_placements(graph, rules, degree)
    return OperatorPlan(operators=divided, parameters=parameters, degree=degree, note=note)


def random_plan(graph: OperatorGraph, degree: int, seed: int) -> OperatorPlan:
    """A plan with a random legal rule for every operator, the same for the same seed."""
    chance = random.Random(seed)
    return planned(graph, degree, lambda _, legal: chance.choice(legal), f"random, seed {seed}")


def batch_plan(graph: OperatorGraph, degree: int) -> OperatorPlan:
    """A plan that divides the samples wherever they can be followed, and nothing else."""

    def choose(key: str, legal: Sequence[Rule]) -> Rule:
        (one, *_) = graph.by_key[key]
        wanted = [_batch_dim(node) for node in (*one.results, *one.inputs) if node is not None]
        return next((rule for rule in legal if rule.divides and _follows(rule, one, wanted)), legal[0])

    return planned(graph, degree, choose, "the batch")


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The fastest plan that was found, and how sure that is.

    Attributes:
        outcome: predicted seconds and bytes, and the bound that no plan is faster than.
        costs: of its operators, the longest first.
    """

    plan: OperatorPlan
    outcome: Outcome
    costs: Sequence[OperatorCost]

    @property
    def text(self) -> str:
        """What is predicted, in two sentences."""
        price = self.outcome.price
        return (
            f"{seconds_text(price.seconds)} a step of forward and backward pass, of them "
            f"{seconds_text(price.conversion_seconds)} of collectives; {bytes_text(price.memory)} a rank (predicted). "
            f"No plan is more than {percent_text(self.outcome.gap)} faster by the same figures."
        )


def solved_plan(
    graph: OperatorGraph,
    degree: int,
    prices: Prices,
    states: States,
    device: torch.device,
    *,
    memory_limit: float | None = None,
    recomputed: bool = False,
    allow: Allow | None = None,
) -> Solved:
    """The plan that is predicted to be the fastest within a memory limit.

    Args:
        memory_limit: bytes of one rank.
        recomputed: whether blocks are recomputed in the backward pass.
        allow: what the user's constraints leave of an operator's rules.

    Raises:
        InputError: if none fits; it names the largest parts.
    """
    legal = legal_rules(graph, degree, allow)
    problem = assemble(graph, legal, prices, states, device, recomputed=recomputed)
    outcome = solve(problem.problem, memory_limit=memory_limit, gap=_GAP, time_limit=_SECONDS)
    plan = problem.plan(outcome, degree)
    return Solved(plan=plan, outcome=outcome, costs=operator_costs(problem, plan))


_GAP = 1e-3
"""Plans that are predicted to be as near as this are equal: no prediction is better."""

_SECONDS = 10.0


def _batch_dim(node: fx.Node) -> int | None:
    """The dimension whose size follows the number of samples."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    return next((dim for dim, size in enumerate(value.shape) if not isinstance(size, int)), None)


def _follows(rule: Rule, one: Operator, wanted: Sequence[int | None]) -> bool:
    """Whether a rule divides each result and argument along its samples."""
    results = [node for node in one.results if node is not None]
    placements = [rule.outputs[one.results.index(node)] for node in results] + list(rule.inputs)
    for placement, dim in zip(placements, wanted, strict=True):
        if dim is not None and placement != Shard(dim):
            return False
        if dim is None and isinstance(placement, Shard):
            return False
    return any(dim is not None for dim in wanted)


def refitted(
    plan: OperatorPlan,
    graph: OperatorGraph,
    degree: int,
    prices: Prices,
    device: torch.device,
    allow: Allow | None = None,
) -> OperatorPlan:
    """The fastest plan for a call that ``plan`` was not made for, with parameters where it has them."""
    problem = assemble(
        graph, legal_rules(graph, degree, allow), prices, States(), device, stored=plan.parameters
    )
    return problem.plan(solve(problem.problem, gap=_GAP, time_limit=_SECONDS), degree)


def division_of(
    plan: OperatorPlan, graph: OperatorGraph, degree: int, summed: frozenset[str] | None = None
) -> Division:
    """The rules of a graph's operators, by a plan; operators that it does not name are whole.

    Args:
        summed: names of parameters whose gradients are summed after the backward pass; by default those of which every use is
            divided.

    Raises:
        InputError: if the plan is for another number of ranks, or divides an operator as it cannot be divided.
    """
    if plan.degree not in (None, degree):
        raise InputError(f"the operator plan is made for {plan.degree} ranks, and there are {degree}.")
    legal = legal_rules(graph, degree)
    illegal = {
        key: plan.operators[key]
        for key in legal
        if key in plan.operators and plan.operators[key] not in legal[key]
    }
    if illegal:
        keys = [*graph.by_key, *{graph.parameter_key(node) for node in graph.origins}]
        raise InputError(
            f"the operator plan divides operators of this model as they cannot be:\n{plan.misfit(keys, legal)}"
        )
    rules = {}
    for one in graph.operators:
        wanted = plan.operators.get(one.key)
        rules[one] = one.call.whole if wanted is None else _equal(wanted, legal[one.key])
    parameters = {
        origin.name: plan.parameters[key]
        for node, origin in graph.origins.items()
        if origin.kind == "parameter" and (key := graph.parameter_key(node)) in plan.parameters
    }
    divided = {
        name: placement for name, placement in parameters.items() if not isinstance(placement, Replicate)
    }
    division = Division(graph, degree, rules, divided)
    return replace(division, summed=division.partly_used() if summed is None else summed)


def check_plan(plan: OperatorPlan, graph: OperatorGraph, degree: int) -> None:
    """Raises an :class:`InputError` if a plan names what a model has not, or divides a parameter as it cannot be."""
    sizes = {
        graph.parameter_key(n): n.meta["val"].shape for n, o in graph.origins.items() if o.kind == "parameter"
    }
    misfit = plan.misfit([*graph.by_key, *sizes], legal_rules(graph, degree))
    for key, one in plan.parameters.items():
        if (
            key in sizes
            and isinstance(one, Shard)
            and (one.dim >= len(sizes[key]) or sizes[key][one.dim] % degree)
        ):
            misfit += f"\n{key}: {list(sizes[key])} is not divided along {one.dim} by {degree} ranks."
    if misfit:
        raise InputError(f"the operator plan does not fit this model:\n{misfit.strip()}")


def _equal(wanted: Rule, legal: Iterable[Rule]) -> Rule:
    """The legal rule that a plan means: it has the kernel, which plans do not name."""
    return next(rule for rule in legal if rule == wanted)
