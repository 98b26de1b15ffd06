"""Divided pipelines: stages of units, their degree and recomputation, and one operator plan for all stages.

Units are blocks, the embedding, the last norm and the head. For each degree, with and without recomputation,
the solver gives plans from the fastest to the one with the least memory. A stage takes the fastest plan that
fits with the activations that its place in the schedule holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest

import torch
from torch import fx

from atorch_ns.capture.graph.operator_graph import Shallow
from atorch_ns.errors import InputError
from atorch_ns.operators.choose import Allow, legal_rules
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.solver.assemble import RESULTS, Assembled, States, assemble
from atorch_ns.operators.solver.prices import OperatorPrices
from atorch_ns.operators.solver.solve import solve
from atorch_ns.pipeline.plan.operator_stages import StagePlan, plan_stages
from atorch_ns.pipeline.plan.stage_costs import PipelineTask, Stage, StageCost

_TIGHTER = (1.0, 0.75, 0.5, 0.35, 0.25)  # memory limits, as parts of what the fastest plan needs

_SECONDS = 5.0  # limit of each search


@dataclass
class _UnitCost:
    """Cost of one unit under a plan, on one rank."""

    forward: float = 0.0  # seconds
    backward: float = 0.0
    resident: float = 0.0  # bytes, as all below
    gradients: float = 0.0
    saved: float = 0.0  # of one micro-batch
    inner: float = 0.0  # while the unit is recomputed
    transient: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Priced:
    plan: OperatorPlan
    units: Mapping[str, _UnitCost]
    seconds: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """A pipeline of divided stages.

    Attributes:
        stages: of units, in their order, with predicted costs.
        starts: paths of the units that stages begin with, the first stage's left out.
        degree: ranks of each stage.
        recomputed: for each stage whether its blocks are recomputed.
        operators: the placements of operators; ``None`` for stages of one rank.
    """

    stages: StagePlan
    starts: tuple[str, ...]
    degree: int
    recomputed: tuple[bool, ...]
    operators: OperatorPlan | None


def staged_plan(
    shallow: Shallow,
    units: Sequence[str],
    task: Callable[[int], PipelineTask],
    prices: Callable[[int], OperatorPrices],
    *,
    states: States,
    device: torch.device,
    pivots: Sequence[str] = (),
    allow: Allow | None = None,
) -> StagedPlan:
    """The fastest pipeline.

    Args:
        shallow: the model's graph, captured with ``units``.
        units: paths of the units, in the order of their calls.
        task: what is planned for, by the number of segments.
        prices: by degree.
        pivots: paths of modules that stages may begin with; any unit, if empty.

    Raises:
        InputError: if a pivot is not a unit, or no pipeline fits.
    """
    kinds = {segment.path: segment.kind for segment in shallow.graph.segments}
    kind_of = [kinds.get(shallow.copy_name(unit), "") for unit in units]
    borders = _segment_borders(units, pivots)
    full_task = task(len(borders) - 1)  # segments lie between borders
    full_task = replace(full_task, send=(_send_seconds(shallow, prices(1)),) * (full_task.num_segments - 1))
    plan_cache: dict[tuple[int, bool], list[_Priced]] = {}  # solved when a stage first asks for them

    def plans(degree: int, recompute: bool) -> list[_Priced]:
        if (degree, recompute) not in plan_cache:
            plan_cache[degree, recompute] = _solve_plans(
                shallow, prices(degree), states, device, recompute=recompute, allow=allow
            )
        return plan_cache[degree, recompute]

    def cost(start: int, stop: int, degree: int, recompute: bool, in_flight: int) -> StageCost | None:
        stage_kinds = kind_of[borders[start] : borders[stop]]
        costs = [
            _stage_cost(plan, stage_kinds, in_flight, stop == len(borders) - 1)
            for plan in plans(degree, recompute)
        ]
        return _fastest_cost(costs, full_task.memory_limit)

    best = plan_stages(cost, full_task)
    degree = best.stages[0].degree
    recomputes = tuple(stage.recompute for stage in best.stages)
    return StagedPlan(
        stages=best,
        starts=tuple(units[borders[stage.start]] for stage in best.stages[1:]),
        degree=degree,
        recomputed=recomputes,
        operators=_common_plan(
            plans(degree, any(recomputes)), best.stages, kind_of, borders, limit=full_task.memory_limit
        )
        if degree > 1
        else None,
    )


def _send_seconds(shallow: Shallow, prices: OperatorPrices) -> float:
    graph = shallow.graph
    inputs: dict[int, set[fx.Node]] = defaultdict(set)  # values from other segments, once each
    for operator in graph.operators:
        for value in operator.inputs:
            producer = graph.producers.get(value)
            if (
                producer is not None
                and producer[0].segment != operator.segment
                and graph.spec(value).requires_grad
            ):
                inputs[operator.segment].add(value)
    sizes = sorted(sum(graph.spec(value).num_bytes for value in values) for values in inputs.values())
    middle = sizes[len(sizes) // 2] if sizes else 0  # the median: most units are alike
    return float(prices.hardware.within_node.message_seconds("send", middle))


def _segment_borders(units: Sequence[str], pivots: Sequence[str]) -> list[int]:
    if not pivots:
        return list(range(len(units) + 1))
    borders = {0, len(units)}
    for pivot in pivots:
        inside = [index for index, unit in enumerate(units) if unit == pivot or unit.startswith(f"{pivot}.")]
        if not inside:
            raise InputError(
                f"no stage can begin with {pivot!r}: stages begin with {', '.join(units[1:12])}"
                f"{' and others' if len(units) > 12 else ''}."
            )
        borders.add(inside[0])  # the first unit inside of the pivot
    return sorted(borders)


def _solve_plans(
    shallow: Shallow,
    prices: OperatorPrices,
    states: States,
    device: torch.device,
    *,
    recompute: bool,
    allow: Allow | None,
) -> list[_Priced]:
    graph = shallow.graph
    assembly = assemble(
        graph, legal_rules(graph, prices.degree, allow), prices, states, device=device, recomputed=recompute
    )
    fastest = solve(assembly.problem, time_limit=_SECONDS)
    plans: list[_Priced] = []
    for part in _TIGHTER:
        try:
            outcome = (
                fastest
                if part == 1.0
                else solve(assembly.problem, memory_limit=fastest.price.memory * part, time_limit=_SECONDS)
            )
        except InputError:  # tighter ones will not fit either
            break
        plan = assembly.plan(outcome, prices.degree)
        if all(plan != candidate.plan for candidate in plans):  # a tighter limit may change nothing
            plans.append(
                _Priced(
                    plan, _unit_costs(shallow, assembly, plan), outcome.price.seconds, outcome.price.memory
                )
            )
    return plans


def _unit_costs(shallow: Shallow, assembly: Assembled, plan: OperatorPlan) -> dict[str, _UnitCost]:
    graph, problem = shallow.graph, assembly.problem
    options = [
        node.options[choice] for node, choice in zip(problem.nodes, assembly.choices(plan), strict=True)
    ]
    kinds = {segment.kind for segment in graph.segments if segment.kind}
    homes = []  # the kind of each node's unit, empty between units
    for node in problem.nodes:
        operators = graph.by_key.get(node.name)
        if operators:
            homes.append(graph.segments[operators[0].segment].kind)
        else:
            homes.append(next((kind for kind in kinds if node.name.startswith(f"{kind}.")), ""))
    costs: dict[str, _UnitCost] = defaultdict(_UnitCost)
    for node, option, home in zip(problem.nodes, options, homes, strict=True):
        cost, again = costs[home], node.group in problem.always_recomputed
        cost.forward += option.forward_seconds / node.count
        cost.backward += (option.seconds - (0.0 if again else option.forward_seconds)) / node.count
        cost.resident += option.resident / node.count
        cost.gradients += option.gradients / node.count
        cost.transient += [option.transient] * min(2, node.count)  # the two largest count
    for use, readers, group in problem.read():
        label, home = use.label(options[use.node]), homes[readers[0].node]
        instances = max(1, problem.nodes[readers[0].node].count)  # the units that share the use
        cost, again = costs[home], group in problem.always_recomputed
        copies = 0.0
        for target in {reader.label(options[reader.node]) for reader in readers}:
            conversion = use.conversions[label, target]
            share = use.count / instances
            cost.forward += share * conversion.forward_seconds
            repeat_seconds = conversion.forward_seconds if again and not use.enters else 0.0
            cost.backward += share * (conversion.seconds - conversion.forward_seconds + repeat_seconds)
            copies += conversion.copy_bytes
        whole = again and use.enters
        labels = {r.label(options[r.node]) for r in readers if whole or problem.saves(r)}
        num_bytes = use.count / instances * (copies + sum(use.saved.get(each, 0.0) for each in labels))
        if problem.nodes[readers[0].node].name == RESULTS:
            costs[""].saved += num_bytes  # the last stage holds them
        elif again and not use.enters:
            cost.inner += num_bytes
        else:
            cost.saved += num_bytes
    return dict(costs)


def _stage_cost(plan: _Priced, kinds: Sequence[str], in_flight: int, is_last: bool) -> StageCost:
    # The last stage computes what lies between units, such as the loss.
    costs = [plan.units[kind] for kind in (*kinds, *([""] if is_last else [])) if kind in plan.units]
    saved_bytes = sum(cost.saved for cost in costs) * in_flight  # micro-batches before their backward pass
    gradients = sum(cost.gradients for cost in costs)
    peaks = [peak for cost in costs for peak in cost.transient]
    memory = sum(cost.resident for cost in costs) + max(saved_bytes, gradients) + sum(nlargest(2, peaks))
    return StageCost(
        forward=sum(cost.forward for cost in costs),
        backward=sum(cost.backward for cost in costs),
        memory=memory + max((cost.inner for cost in costs), default=0.0),  # one unit at a time
    )


def _fastest_cost(costs: Sequence[StageCost], limit: float | None) -> StageCost | None:
    fitting = [cost for cost in costs if limit is None or cost.memory <= limit]
    return (
        min(fitting, key=lambda cost: cost.seconds) if fitting else min(costs, key=lambda cost: cost.memory)
    )


def _common_plan(
    plans: Sequence[_Priced],
    stages: Sequence[Stage],
    kind_of: Sequence[str],
    borders: Sequence[int],
    *,
    limit: float | None,
) -> OperatorPlan:
    def most(plan: _Priced) -> float:
        return max(
            _stage_cost(
                plan,
                kind_of[borders[entry.start] : borders[entry.stop]],
                entry.in_flight,
                entry is stages[-1],
            ).memory
            for entry in stages
        )

    fitting = [entry for entry in plans if limit is None or most(entry) <= limit]
    return (min(fitting, key=lambda entry: entry.seconds) if fitting else min(plans, key=most)).plan
