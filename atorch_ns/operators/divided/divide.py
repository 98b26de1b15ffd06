"""Division of a captured forward pass: for each segment a graph on one rank's pieces, with collectives.

Numbers keep their whole value: a size read off a divided tensor is multiplied. Where a result's sizes are an
argument, the divided size is divided again. Blocks with equal graphs share one module.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from atorch_ns.capture.graph.operator_graph import Operator, OperatorGraph, OperatorSegment
from atorch_ns.errors import InputError
from atorch_ns.operators.divided.calls import runnable
from atorch_ns.operators.divided.conversions import ArgumentNeed, need_of, steps
from atorch_ns.operators.rules.rule import WHOLE, Placement, Rule
from atorch_ns.operators.rules.views import size_argument
from atorch_ns.sharding.collectives import scale_gradient


@dataclass(frozen=True, eq=False)
class OperatorDivision:
    """The rules of all operators of a graph, and the placements of its parameters.

    Attributes:
        parameters: the placement of each parameter, by name; others are whole.
        summed: whole parameters whose gradients, a part on each rank, are summed after the backward pass.
    """

    graph: OperatorGraph
    degree: int
    rules: Mapping[Operator, Rule]
    parameters: Mapping[str, Placement]
    summed: frozenset[str] = frozenset()

    def placement(self, value: fx.Node) -> Placement:
        """The placement in which its producer leaves a value."""
        producer = self.graph.producers.get(value)
        if producer is not None:
            op, number = producer
            return self.rules[op].outputs[number]
        origin = self.graph.origins.get(value)
        if origin is not None and origin.kind == "parameter":
            return self.parameters.get(origin.name, WHOLE)
        return WHOLE

    def uses(self) -> Iterator[tuple[fx.Node, Operator, ArgumentNeed]]:
        """Each input value of each operator, with the need for it."""
        for op, rule in self.rules.items():
            for number, value in enumerate(op.inputs):
                yield value, op, need_of(rule, number)

    def partly_used(self) -> frozenset[str]:
        """Names of whole parameters whose uses are all divided. Each rank has a part of their gradients."""
        needs: dict[str, list[ArgumentNeed]] = {}
        for value, _, need in self.uses():
            origin = self.graph.origins.get(value)
            if origin is not None and origin.kind == "parameter" and origin.name not in self.parameters:
                needs.setdefault(origin.name, []).append(need)
        whole = ArgumentNeed(WHOLE, True)  # replicated, for a part of the work
        return frozenset(name for name, uses in needs.items() if all(need == whole for need in uses))


@dataclass(frozen=True, eq=False)
class Piece:
    """One segment on one rank.

    Attributes:
        path: path of the block whose forward pass it is; empty between blocks.
        body: called as ``body(group, *states, *values)``, returns a tuple. Equal pieces share one body.
        states: names of the parameters and buffers that it takes, relative to its block.
        takes, gives: names of its other inputs, and of its outputs.
        calls, values: its operators, and the captured values it computes, by number of the body's node.
    """

    path: str
    body: fx.GraphModule
    states: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    calls: Mapping[int, Operator]
    values: Mapping[int, fx.Node]

    @property
    def code(self) -> str:
        """The body as Python code. Each operator follows the line of the user's code that calls it."""
        return self.body.graph.python_code("self", verbose=True).src


def pieces(division: OperatorDivision) -> tuple[Piece, ...]:
    """The segments of a divided graph, in the order in which they run.

    Raises:
        InputError: if a size that a rule divides is not divisible.
    """
    shared: dict[Any, fx.GraphModule] = {}
    exports = _needed_outside(division.graph)
    return tuple(
        _Builder(division, segment).piece(exports[number], shared)
        for number, segment in enumerate(division.graph.segments)
    )


def _needed_outside(graph: OperatorGraph) -> list[list[fx.Node]]:
    # For each segment, the values (numbers included) that later segments or the results need.
    outputs = set(graph.outputs)
    return [
        [
            node
            for node in segment.nodes
            if node in outputs or any(user not in inside for user in node.users if user.op != "output")
        ]
        for segment in graph.segments
        for inside in [set(segment.nodes)]
    ]


class _Builder:
    """Builds the graph of one segment."""

    def __init__(self, division: OperatorDivision, segment: OperatorSegment) -> None:
        self._division = division
        self._segment = segment
        self._graph = fx.Graph()
        self._group = self._graph.placeholder("group")
        self._raw: dict[fx.Node, fx.Node] = {}  # new node by captured node, placed as its producer gives it
        self._conversions: dict[tuple[fx.Node, ArgumentNeed], fx.Node] = {}  # one for all its readers
        self._divided_numbers: dict[fx.Node, fx.Node] = {}  # sizes over the degree
        self._calls: dict[fx.Node, Operator] = {}
        inside = set(segment.nodes)
        self._outer = dict.fromkeys(  # values from outside of the segment, in order of use
            value for node in segment.nodes for value in node.all_input_nodes if value not in inside
        )
        self._operators = {
            op.node: (op, rule)
            for op, rule in division.rules.items()
            if division.graph.segments[op.segment] is segment
        }

    def piece(self, gives: Sequence[fx.Node], shared: dict[Any, fx.GraphModule]) -> Piece:
        states, takes = self._add_placeholders()
        for node in self._segment.nodes:
            if node in self._operators:
                self._add_operator(*self._operators[node])
            elif node not in self._raw and node.target is not operator.getitem:  # added with its operator
                self._add_number(node)
        gives = [value for value in gives if value in self._raw]
        self._graph.output(tuple(self._raw[value] for value in gives))
        self._graph.eliminate_dead_code()
        key = (states, _graph_key(self._graph))
        if key not in shared:  # equal blocks share one module
            shared[key] = fx.GraphModule(torch.nn.Module(), self._graph)
        numbers = {node: number for number, node in enumerate(self._graph.nodes)}  # once dead code is gone
        ran = {numbers[node]: op for node, op in self._calls.items() if node in numbers}
        computed_values = {
            numbers[node]: old
            for old, node in self._raw.items()
            if node in numbers and old not in self._outer
        }
        inputs, outputs = (tuple(value.name for value in values) for values in (takes, gives))
        return Piece(self._segment.path, shared[key], states, inputs, outputs, ran, computed_values)

    def _add_placeholders(self) -> tuple[tuple[str, ...], list[fx.Node]]:
        states = {value: name for value in self._outer if (name := self._own_state(value)) is not None}
        for value, name in states.items():
            # It may begin with a digit.
            self._raw[value] = self._graph.placeholder(re.sub(r"\W", "_", f"p_{name}"))
        takes = [value for value in self._outer if value not in states]
        for number, value in enumerate(takes):
            self._raw[value] = self._graph.placeholder(f"value_{number}")
        return tuple(states.values()), takes

    def _own_state(self, value: fx.Node) -> str | None:
        origin = self._division.graph.origins.get(value)
        if origin is None or origin.kind not in ("parameter", "buffer"):
            return None
        path = self._segment.path
        if not path:  # between blocks, names are those of the model
            return origin.name
        return origin.name.removeprefix(f"{path}.") if origin.name.startswith(f"{path}.") else None

    def _add_operator(self, op: Operator, rule: Rule) -> None:
        inputs = iter([self._value_for(v, need_of(rule, number), op) for number, v in enumerate(op.inputs)])

        # map_arg visits arguments in the order of op.inputs.
        def put(value: fx.Node) -> Any:
            return next(inputs) if isinstance(value.meta["val"], torch.Tensor) else self._raw[value]

        args = list(fx.node.map_arg(op.node.args, put))
        kwargs = dict(fx.node.map_arg(op.node.kwargs, put))
        if rule.divides:
            self._divide_sizes(op, rule, args, kwargs)
        target, needs_group = runnable(op, rule)
        first = (self._group,) if needs_group else ()
        call = self._graph.call_function(target, (*first, *args), kwargs)
        call.meta = {key: op.node.meta[key] for key in ("stack_trace",) if key in op.node.meta}
        self._calls[call] = op
        if isinstance(op.node.meta["val"], torch.Tensor):
            self._raw[op.node] = call
            return
        for result in op.node.users:  # its place is among all results, numbers included
            if result.target is operator.getitem:
                self._raw[result] = self._graph.call_function(operator.getitem, (call, result.args[1]))

    def _value_for(self, value: fx.Node, need: ArgumentNeed, user: Operator) -> fx.Node:
        raw = self._raw[value]
        source = self._division.placement(value)
        origin = self._division.graph.origins.get(value)
        is_summed = origin is not None and origin.kind == "parameter" and origin.name in self._division.summed
        learns = self._division.graph.spec(value).requires_grad
        # Every rank has the whole gradient here. It is scaled, because gradients are summed later.
        if is_summed and learns and need != ArgumentNeed(WHOLE, True):
            raw = self._graph.call_function(scale_gradient, (raw, 1 / self._division.degree))
        if is_summed or not learns:  # no gradient to sum, or not here
            need = ArgumentNeed(need.placement, False)
        if (value, need) not in self._conversions:
            node = raw
            for step in steps(source, need):
                node = self._graph.call_function(step.collective, (node, *step.dims, self._group))
            if node is self._raw[value] or user.pinned:  # what is written to later is not what it was
                return node
            self._conversions[value, need] = node
        return self._conversions[value, need]

    def _add_number(self, node: fx.Node) -> None:
        # A size is read from the piece and multiplied below. Other numbers need the whole tensor.
        def whole(value: fx.Node) -> fx.Node:
            if node.target is torch.ops.aten.sym_size.int or not isinstance(value.meta["val"], torch.Tensor):
                return self._raw[value]
            result = self._raw[value]
            for step in steps(self._division.placement(value), ArgumentNeed(WHOLE, False)):
                result = self._graph.call_function(step.collective, (result, *step.dims, self._group))
            return result

        result = self._graph.node_copy(node, whole)
        result.meta = {}  # that of the captured node describes whole tensors
        if node.target is torch.ops.aten.sym_size.int:
            value, dim = node.args
            placement = self._division.placement(value)  # type: ignore[arg-type]
            if isinstance(placement, Shard) and placement.dim == dim:
                result = self._graph.call_function(operator.mul, (result, self._division.degree))
        self._raw[node] = result

    def _divide_sizes(self, op: Operator, rule: Rule, args: list[Any], kwargs: dict[str, Any]) -> None:
        # An argument of sizes describes the whole result. The divided size is replaced by a piece's size.
        placement = rule.outputs[0]
        argument = size_argument(op.call) if isinstance(placement, Shard) else None
        if argument is None:
            return
        assert isinstance(placement, Shard)
        name, position, offset = argument
        holder: Any = kwargs if name in kwargs else args
        where: Any = name if name in kwargs else position
        sizes = list(holder[where])
        if not 0 <= placement.dim - offset < len(sizes):  # the argument does not cover this dim
            return
        sizes[placement.dim - offset] = self._local_size(sizes[placement.dim - offset], op)
        holder[where] = sizes

    def _local_size(self, size: Any, op: Operator) -> Any:
        if isinstance(size, fx.Node):
            if size not in self._divided_numbers:
                quotient = self._graph.call_function(operator.floordiv, (size, self._division.degree))
                self._divided_numbers[size] = quotient
            return self._divided_numbers[size]
        if size == -1:  # inferred from the piece
            return size
        if size % self._division.degree:
            raise InputError(f"{op} has size {size}, which is not divisible by {self._division.degree}.")
        return size // self._division.degree


def _graph_key(graph: fx.Graph) -> Any:
    # Equal for graphs that differ only in the names of their nodes.
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers[value])
        if isinstance(value, (tuple, list)):
            return tuple(plain(item) for item in value)
        if isinstance(value, slice):
            return ("slice", plain(value.start), plain(value.stop), plain(value.step))
        return (type(value), value if isinstance(value, _HASHED) else repr(value))  # 1 == True == 1.0

    return tuple(
        (
            node.op,
            getattr(node.target, "like", node.target) if node.op == "call_function" else "",
            plain(node.args),
            tuple((name, plain(value)) for name, value in node.kwargs.items()),
        )
        for node in graph.nodes
    )


_HASHED = (bool, int, float, str, type(None), torch.dtype, torch.device)
