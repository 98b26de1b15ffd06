"""Assembling of a division problem: a captured graph, its rules and their prices as nodes, options and uses.

Operators of one key are one node. Each segment that reads a value is one use, as it converts it only once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from atorch_ns.capture.graph.call import TensorSpec
from atorch_ns.capture.graph.operator_graph import Operator, OperatorGraph
from atorch_ns.operators.divided.conversions import ArgumentNeed, need_of
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.rules.rule import SUM, WHOLE, Placement, Rule, placement_text
from atorch_ns.operators.solver.prices import OperatorPrices, Work, work_of
from atorch_ns.operators.solver.problem import (
    ConversionCost,
    Group,
    Input,
    Label,
    OperatorNode,
    Option,
    PlacementProblem,
    Price,
    Use,
    price,
)
from atorch_ns.operators.solver.solve import SolvedProblem

LegalRules = Mapping[str, tuple[Rule, ...]]
"""Legal rules by operator key, which hold for all operators with the key. The first divides nothing."""

RESULTS = "results of the model"
"""Key of the node that reads them."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Training memory of a parameter, in units of the parameter's own bytes.

    Attributes:
        gradient: size of the gradient.
        optimizer: size of the optimizer states; 2 for Adam in one precision.
        shards: number of data ranks over which gradients and states are sharded.
        gradients_stay: whether gradients stay alive in forward passes, as with micro-batches or buckets.
    """

    gradient: float = 1.0
    optimizer: float = 2.0
    shards: int = 1
    gradients_stay: bool = False

    def of(self, parameter_bytes: float) -> tuple[float, float]:
        """Bytes that are always held for a parameter, and bytes of a gradient that a backward pass adds."""
        gradient = parameter_bytes * self.gradient / self.shards
        resident = parameter_bytes * (1 + self.optimizer / self.shards)
        return (resident + gradient, 0.0) if self.gradients_stay else (resident, gradient)


@dataclass(frozen=True)
class Assembled:
    """A problem, and the rules, placements and keys behind its nodes.

    Attributes:
        rules: the rule of each option, by node; empty for values from outside.
        placements: the placement of each option of a parameter, by node.
        keys: the key of each node's operators or parameters.
    """

    problem: PlacementProblem
    rules: tuple[tuple[Rule, ...], ...]
    placements: tuple[tuple[Placement, ...], ...]
    keys: tuple[str, ...]

    def plan(self, outcome: SolvedProblem, degree: int) -> OperatorPlan:
        """The plan of a solution."""
        operators: dict[str, Rule] = {}
        parameters: dict[str, Placement] = {}
        rows = zip(self.keys, self.rules, self.placements, outcome.choices, strict=True)
        for key, rules, placements, choice in rows:
            if rules and rules[choice].divides:
                operators[key] = rules[choice]
            elif placements and not isinstance(placements[choice], Replicate):
                parameters[key] = placements[choice]
        return OperatorPlan(operators=operators, parameters=parameters, degree=degree)

    def choices(self, plan: OperatorPlan) -> list[int]:
        """The option of each node under a legal plan. Nodes that it does not name stay whole."""
        indices = []
        for key, rules, placements in zip(self.keys, self.rules, self.placements, strict=True):
            if rules:
                indices.append(rules.index(plan.operators.get(key, rules[0])))
            else:
                indices.append(placements.index(plan.parameters.get(key, WHOLE)) if placements else 0)
        return indices

    def price(self, plan: OperatorPlan) -> Price:
        """The predicted costs of a plan."""
        return price(self.problem, self.choices(plan))


def assemble(
    graph: OperatorGraph,
    legal: LegalRules,
    prices: OperatorPrices,
    states: States,
    *,
    device: torch.device,
    recomputed: bool = False,
    stored: Mapping[str, Placement] | None = None,
) -> Assembled:
    """The problem of dividing a graph.

    Args:
        device: device of the fake tensors on which operators are measured.
        recomputed: whether blocks are recomputed in the backward pass.
        stored: fixed placements of parameters by key; others are whole. ``None`` if all are free.
    """
    return _Assembly(graph, legal, prices, states, device=device, recomputes=recomputed, layout=stored).make()


@dataclass
class _Draft:
    """A node under construction."""

    key: str
    options: tuple[Option, ...]
    count: int = 0
    inputs: dict[tuple[int, int], Input] = field(default_factory=dict)  # by argument and use
    rules: tuple[Rule, ...] = ()
    placements: tuple[Placement, ...] = ()
    group: str = ""


class _Assembly:
    def __init__(
        self,
        graph: OperatorGraph,
        legal: LegalRules,
        prices: OperatorPrices,
        states: States,
        *,
        device: torch.device,
        recomputes: bool,
        layout: Mapping[str, Placement] | None,
    ) -> None:
        self._graph, self._legal, self._prices = graph, legal, prices
        self._states, self._device, self._recomputes, self._layout = states, device, recomputes, layout
        self._drafts: list[_Draft] = []
        self._numbers: dict[str, int] = {}  # index of a draft by its key
        self._results: dict[fx.Node, tuple[int, int]] = {}  # the draft and the result that give a value
        self._work: dict[str, Work] = {}
        learners = (op for op in graph.operators if any(spec.requires_grad for spec in op.call.outputs))
        self._num_readers = Counter(value for op in learners for value in dict.fromkeys(op.inputs))
        self._uses: dict[Any, int] = {}  # index of a use by its source, the kind of segment, and its readers
        self._use_fields: list[dict[str, Any]] = []

    def make(self) -> Assembled:
        for node in self._graph.origins:
            self._add_origin(node)
        for op in self._graph.operators:
            self._add_operator(op)
        self._link_readers()
        groups = {
            draft.group: Group(count=draft.count, recomputed=True) for draft in self._drafts if draft.group
        }
        nodes = tuple(self._build_node(draft) for draft in self._drafts)
        works = [(self._work[d.key], d.count) for d in self._drafts if d.key in self._work]
        launches = sum(n * (w.forward.num_operators + w.backward.num_operators) for w, n in works)
        # On a CPU the time of an operator includes it.
        host = 0.0 if self._prices.device.type == "cpu" else launches * self._prices.device.launch_s
        problem = PlacementProblem(nodes, tuple(Use(**kwargs) for kwargs in self._use_fields), groups, host)
        return Assembled(
            problem,
            tuple(draft.rules for draft in self._drafts),
            tuple(draft.placements for draft in self._drafts),
            tuple(draft.key for draft in self._drafts),
        )

    def _build_node(self, draft: _Draft) -> OperatorNode:
        positions = [position for position, _ in draft.inputs]  # an argument is listed once for each use
        options = tuple(
            Option(
                outputs=option.outputs,
                needs=tuple(option.needs[position] for position in positions),
                seconds=option.seconds * draft.count,
                forward_seconds=option.forward_seconds * draft.count,
                resident=option.resident * draft.count,
                gradients=option.gradients * draft.count,
                saved=option.saved * draft.count,
                transient=option.transient,  # of one instance: they run one after the other
            )
            for option in draft.options
        )
        return OperatorNode(
            name=draft.key,
            options=options,
            inputs=tuple(draft.inputs.values()),
            count=max(draft.count, 1),
            group=draft.group,
        )

    def _ensure_draft(self, key: str, make: Any) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._drafts)
            self._drafts.append(make())
        return self._numbers[key]

    def _add_origin(self, value: fx.Node) -> None:
        origin = self._graph.origins[value]
        spec = self._graph.spec(value)
        if origin.kind != "parameter":  # inputs, buffers and constants stay whole
            number = self._ensure_draft(value.name, lambda: _Draft(value.name, (Option(outputs=("R",)),)))
            self._drafts[number].count = 1
        else:
            key = self._graph.parameter_key(value)
            number = self._ensure_draft(key, lambda: self._draft_parameter(key, spec))
            self._drafts[number].count += self._count_of(origin.name)
        self._results[value] = (number, 0)

    def _count_of(self, name: str) -> int:
        for number, segment in enumerate(self._graph.segments):
            if segment.path and name.startswith(f"{segment.path}."):
                return self._graph.count(number)  # blocks of the model that this one stands for
        return 1

    def _draft_parameter(self, key: str, spec: TensorSpec) -> _Draft:
        degree = self._prices.degree
        dims = [dim for dim, size in enumerate(spec.shape) if size and size % degree == 0]
        placements: list[Placement] = [WHOLE, *(Shard(dim) for dim in dims)]
        if self._layout is not None:
            placements = [self._layout.get(key, WHOLE)]
        # Equally fast plans: prefer whole parameters, whose gradients are reduced together.
        options = tuple(
            Option(
                outputs=(placement_text(placement),),
                seconds=0.0 if placement == WHOLE else self._prices.device.launch_s / 10,
                resident=resident,
                gradients=gradients,
            )
            for placement, (resident, gradients) in (
                (placement, self._held_bytes(spec, placement)) for placement in placements
            )
        )
        return _Draft(key, options, placements=tuple(placements))

    def _held_bytes(self, spec: TensorSpec, placement: Placement) -> tuple[float, float]:
        local = self._prices.local_bytes(spec, placement)
        return self._states.of(local) if spec.requires_grad else (local, 0.0)

    def _add_operator(self, op: Operator) -> None:
        number = self._ensure_draft(op.key, lambda: self._draft_operator(op))
        self._drafts[number].count += self._graph.count(op.segment)
        for index, node in enumerate(op.results):
            if node is not None:
                self._results[node] = (number, index)

    def _draft_operator(self, op: Operator) -> _Draft:
        readers = [self._num_readers[node] if node is not None else 0 for node in op.results]
        work = work_of(op, self._device, self._prices.device.type).summing_gradients(op.call.outputs, readers)
        self._work[op.key] = work
        rules = self._legal[op.key]
        segment = self._graph.segments[op.segment]
        group = segment.kind if self._recomputes and segment.path else ""  # whole blocks are recomputed
        return _Draft(
            op.key, tuple(self._build_option(op, rule, work) for rule in rules), rules=rules, group=group
        )

    def _build_option(self, op: Operator, rule: Rule, work: Work) -> Option:
        forward, backward = self._prices.seconds(op, rule, work)
        sizes = zip((*op.call.tensors, *op.call.outputs), (*rule.inputs, *rule.outputs), strict=True)
        local = 0.0 if work.is_view else sum(self._prices.local_bytes(*pair) for pair in sizes)
        return Option(
            outputs=tuple(map(placement_text, rule.outputs)),
            needs=tuple(str(need_of(rule, index)) for index in range(len(rule.inputs))),
            seconds=forward + backward,
            forward_seconds=forward,
            saved=work.saved_bytes / (self._prices.degree if rule.divides else 1),  # such as masks
            transient=local,  # its inputs and results, or their gradients in the backward pass
        )

    def _link_readers(self) -> None:
        readers: dict[tuple[fx.Node, int], list[tuple[Operator, int]]] = {}
        for op in self._graph.operators:
            for index, value in enumerate(op.inputs):
                readers.setdefault((value, op.segment), []).append((op, index))
        for (value, segment), reads in readers.items():
            source = self._results[value]
            marks = tuple((self._numbers[op.key], index) for op, index in reads)
            kind = self._graph.segments[segment].kind or segment  # equal blocks share their uses
            saves = [self._work[self._drafts[number].key].saved_inputs[index] for number, index in marks]
            use = self._add_use(value, source, segment, (source, kind, marks), is_saved=any(saves))
            for (number, index), one_saves in zip(marks, saves, strict=True):
                self._drafts[number].inputs[index, use] = Input(use, one_saves)
        self._add_results()

    def _add_results(self) -> None:
        leaving = self._graph.outputs  # whole on every rank, held until the step ends
        number = self._ensure_draft(
            RESULTS, lambda: _Draft(RESULTS, (Option(needs=("R",) * len(leaving)),), count=1)
        )
        for index, value in enumerate(leaving):
            producer = self._graph.producers.get(value)
            segment = producer[0].segment if producer else 0
            use = self._add_use(value, self._results[value], segment, (RESULTS, index), is_saved=True)
            self._drafts[number].inputs[index, use] = Input(use, True)

    def _add_use(
        self, value: fx.Node, source: tuple[int, int], segment: int, mark: Any, *, is_saved: bool
    ) -> int:
        if mark not in self._uses:
            self._uses[mark] = len(self._use_fields)
            spec = self._graph.spec(value)
            origin = self._graph.origins.get(value)
            producer = self._graph.producers.get(value)
            inside = (
                producer is not None
                and self._graph.segments[producer[0].segment].path == self._graph.segments[segment].path
            )
            is_parameter = origin is not None and origin.kind == "parameter"
            node, result = source
            self._use_fields.append(
                {
                    "node": node,
                    "result": result,
                    "conversions": self._price_conversions(
                        spec, is_parameter, is_saved=is_saved, by_whole=self._graph.in_units and not inside
                    ),
                    "saved": {} if is_parameter else self._saved_bytes(spec),
                    "count": 0,
                    # A parameter is converted inside of the block, again where it is recomputed.
                    "enters": self._recomputes
                    and not (inside or is_parameter)
                    and bool(self._graph.segments[segment].path),
                }
            )
        number = self._uses[mark]
        self._use_fields[number]["count"] += self._graph.count(segment)
        return number

    def _price_conversions(
        self, spec: TensorSpec, is_parameter: bool, *, is_saved: bool, by_whole: bool
    ) -> Mapping[tuple[Label, Label], ConversionCost]:
        conversions: dict[tuple[Label, Label], ConversionCost] = {}
        for source in self._possible_placements(spec):
            for need in self._needs_for(spec):
                if is_parameter and (source, need) == (WHOLE, ArgumentNeed(WHOLE, True)):
                    seconds, num_bytes = self._prices.gradient_sum(spec)
                    forward = 0.0  # summed after the backward pass: nothing to repeat
                else:
                    way = [(source, need)]
                    if by_whole and not is_parameter and source != WHOLE:
                        way = [(source, ArgumentNeed(WHOLE, False)), (WHOLE, need)]  # whole between units
                    costs = [self._prices.conversion(spec, *step) for step in way]
                    seconds, num_bytes = sum(cost for cost, _ in costs), sum(cost for _, cost in costs)
                    forward = seconds / 2  # the backward pass takes as long
                is_copied = is_parameter and is_saved and source != need.placement  # a gathered copy
                memory = self._prices.local_bytes(spec, need.placement) if is_copied else 0.0
                conversions[placement_text(source), str(need)] = ConversionCost(
                    seconds, num_bytes, forward, memory
                )
        return conversions

    def _possible_placements(self, spec: TensorSpec) -> Sequence[Placement]:
        degree = self._prices.degree
        shards = [Shard(dim) for dim, size in enumerate(spec.shape) if size and size % degree == 0]
        return [WHOLE, *shards, *([SUM] if spec.is_float else [])]

    def _needs_for(self, spec: TensorSpec) -> Sequence[ArgumentNeed]:
        return [
            *(ArgumentNeed(placement, False) for placement in self._possible_placements(spec)),
            ArgumentNeed(WHOLE, True),
        ]

    def _saved_bytes(self, spec: TensorSpec) -> Mapping[Label, float]:
        return {str(need): self._prices.local_bytes(spec, need.placement) for need in self._needs_for(spec)}
