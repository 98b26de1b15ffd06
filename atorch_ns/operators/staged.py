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

from atorch_ns.capture.graph.operator_graph import OperatorGraph, Shallow
from atorch_ns.errors import InputError
from atorch_ns.operators.choose import Allow, legal_rules
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.solver.assemble import RESULTS, Assembled, States, assemble
from atorch_ns.operators.solver.prices import OperatorPrices
from atorch_ns.operators.solver.problem import ConversionCost, OperatorNode, Option
from atorch_ns.operators.solver.solve import solve
from atorch_ns.pipeline.plan.operator_stages import StagePlan, plan_stages
from atorch_ns.pipeline.plan.stage_costs import PipelineTask, Stage, StageCost

_TIGHTER = (1.0, 0.75, 0.5, 0.35, 0.25)  # memory limits, as shares of the fastest plan's memory

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

    def add_operator(self, node: OperatorNode, option: Option, *, is_recomputed: bool) -> None:
        # Costs are divided by the instances. With recomputation the backward pass repeats the forward pass.
        self.forward += option.forward_seconds / node.count
        self.backward += (option.seconds - (0.0 if is_recomputed else option.forward_seconds)) / node.count
        self.resident += option.resident / node.count
        self.gradients += option.gradients / node.count
        if is_recomputed:
            self.inner += option.saved / node.count
        else:
            self.saved += option.saved / node.count
        self.transient += [option.transient] * min(2, node.count)  # the two largest count

    def add_conversion(self, conversion: ConversionCost, share: float, *, is_repeated: bool) -> None:
        repeat_seconds = conversion.forward_seconds if is_repeated else 0.0
        self.forward += share * conversion.forward_seconds
        self.backward += share * (conversion.seconds - conversion.forward_seconds + repeat_seconds)


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
        stages: the stages in the order of the model, as ranges of units, with predicted costs.
        starts: path of the first unit of each stage except the first stage.
        degree: number of ranks per stage.
        recomputed: whether the blocks of each stage are recomputed.
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
        task: makes the planning task for a number of segments.
        prices: operator prices, by degree.
        pivots: paths of modules that may begin a stage; empty for any unit.

    Raises:
        InputError: if a pivot is not a unit, or no pipeline fits.
    """
    kinds = {segment.path: segment.kind for segment in shallow.graph.segments}
    kind_of = [kinds.get(shallow.copy_name(unit), "") for unit in units]
    borders = _segment_borders(units, pivots)
    full_task = task(len(borders) - 1)  # segments lie between borders
    all_devices = prices(full_task.num_devices)
    sends = {degree: _send_seconds(shallow, all_devices, degree) for degree in full_task.allowed_degrees}
    full_task = replace(full_task, send_by_degree=sends)
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


def _send_seconds(shallow: Shallow, prices: OperatorPrices, degree: int) -> float:
    graph = shallow.graph
    inputs: dict[int, set[fx.Node]] = defaultdict(set)  # values from other segments, once each
    for operator in graph.operators:
        for value in operator.inputs:
            producer = graph.producers.get(value)
            is_outer = producer is not None and producer[0].segment != operator.segment
            if is_outer and graph.spec(value).requires_grad:
                inputs[operator.segment].add(value)
    sizes = sorted(sum(graph.spec(value).num_bytes for value in values) for values in inputs.values())
    middle = sizes[len(sizes) // 2] if sizes else 0  # the median: most units are alike
    # The mean over all borders: which of them lie between nodes follows from all stages together.
    firsts, per_node = range(degree, prices.degree, degree), int(prices.groups.within[0])
    far = sum((first - degree) // per_node < (first + degree - 1) // per_node for first in firsts)
    links = prices.hardware.within_node, prices.hardware.between_nodes
    inside, outside = (float(link.message_seconds("send", middle)) for link in links)
    return inside + (outside - inside) * far / max(1, len(firsts))


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
    problem = assembly.problem
    fastest = solve(problem, time_limit=_SECONDS)
    plans: list[_Priced] = []
    for part in _TIGHTER:
        limit = fastest.price.memory * part
        try:
            outcome = fastest if part == 1.0 else solve(problem, memory_limit=limit, time_limit=_SECONDS)
        except InputError:  # tighter ones will not fit either
            break
        plan = assembly.plan(outcome, prices.degree)
        if all(plan != candidate.plan for candidate in plans):  # a tighter limit may change nothing
            units = _unit_costs(shallow, assembly, plan)
            plans.append(_Priced(plan, units, outcome.price.seconds, outcome.price.memory))
    return plans


def _unit_costs(shallow: Shallow, assembly: Assembled, plan: OperatorPlan) -> dict[str, _UnitCost]:
    # Of one instance of each kind of unit, from which the cost of any stage is summed.
    problem, recomputed_groups = assembly.problem, assembly.problem.always_recomputed
    options = [
        node.options[choice] for node, choice in zip(problem.nodes, assembly.choices(plan), strict=True)
    ]
    homes = _find_homes(shallow.graph, problem.nodes)
    costs: dict[str, _UnitCost] = defaultdict(_UnitCost)
    for node, option, home in zip(problem.nodes, options, homes, strict=True):
        costs[home].add_operator(node, option, is_recomputed=node.group in recomputed_groups)
    for use, readers, group in problem.read():
        first = readers[0].node  # all of them are in one kind of unit
        cost, share = costs[homes[first]], use.count / max(1, problem.nodes[first].count)
        is_repeated = group in recomputed_groups and not use.enters
        label, copies = use.label(options[use.node]), 0.0
        for target in {reader.label(options[reader.node]) for reader in readers}:
            cost.add_conversion(use.conversions[label, target], share, is_repeated=is_repeated)
            copies += use.conversions[label, target].copy_bytes
        saved = problem.saved_bytes(use, readers, options, is_recomputed=group in recomputed_groups)
        num_bytes = share * (copies + saved)
        if problem.nodes[first].name == RESULTS:
            costs[""].saved += num_bytes  # the last stage holds them
        elif is_repeated:
            cost.inner += num_bytes
        else:
            cost.saved += num_bytes
    return dict(costs)


def _find_homes(graph: OperatorGraph, nodes: Sequence[OperatorNode]) -> list[str]:
    # The kind of each node's unit, empty between units. The name of other nodes has the path of the unit.
    kinds = {segment.kind for segment in graph.segments if segment.kind}
    homes = []
    for node in nodes:
        if operators := graph.by_key.get(node.name):
            homes.append(graph.segments[operators[0].segment].kind)
        else:
            homes.append(next((kind for kind in kinds if node.name.startswith(f"{kind}.")), ""))
    return homes


def _stage_cost(plan: _Priced, kinds: Sequence[str], in_flight: int, is_last: bool) -> StageCost:
    # The last stage computes the code between units, such as the loss.
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
    def stage_memory(plan: _Priced, stage: Stage) -> float:
        kinds = kind_of[borders[stage.start] : borders[stage.stop]]
        return _stage_cost(plan, kinds, stage.in_flight, stage is stages[-1]).memory

    def most(plan: _Priced) -> float:
        return max(stage_memory(plan, stage) for stage in stages)

    fitting = [plan for plan in plans if limit is None or most(plan) <= limit]
    return (min(fitting, key=lambda plan: plan.seconds) if fitting else min(plans, key=most)).plan
