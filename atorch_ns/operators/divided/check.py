"""Check of a division: the divided graph on simulated ranks against the whole one, operator by operator.

Both run on equal values: the sample's integers, and random parameters, as ones and zeros hide wrong rules.
They run in fp32 and, if results differ, again in fp64. Random operators return their input. The error names
the first operator whose results differ or, if all results agree, the last whose gradients differ.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.distributed.tensor import Partial, Shard

from atorch_ns.capture.graph.operator_graph import Operator
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.errors import InputError
from atorch_ns.operators.divided.calls import is_random, runnable, without_autocast
from atorch_ns.operators.divided.conversions import ArgumentNeed, convert_placement, local_shape
from atorch_ns.operators.divided.divide import OperatorDivision, Piece, pieces
from atorch_ns.operators.rules.rule import WHOLE, Placement, whole_rule
from atorch_ns.sharding.collectives import simulate, total
from atorch_ns.sharding.compare import gradient_floor, relative_error
from atorch_ns.text import error_line

TOLERANCE = 1e-4
"""Allowed error in fp32, relative to a tensor's largest value."""


def check_division(
    division: OperatorDivision,
    model: nn.Module,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    *,
    run: Sequence[Piece] | None = None,
) -> None:
    """Compares a divided graph with the whole one, forward and backward.

    Args:
        division: the division of the whole model or of a shallow copy.
        model: the captured model. Its buffers are read, its parameters are not.
        tensors: the inputs, with any number of samples that the ranks divide.
        run: the pieces to run in place of those that follow from the division.

    Raises:
        InputError: naming the first operator whose result or gradient differs.
    """
    all_pieces = pieces(division) if run is None else run
    try:
        _check_in(torch.float32, division, model, tensors, device, all_pieces)
    except InputError as differs:
        try:  # fp64 shows whether rounding in fp32 was the cause
            _check_in(torch.float64, division, model, tensors, device, all_pieces)
        except (InputError, RuntimeError):
            raise differs from None


def _check_in(
    dtype: torch.dtype,
    division: OperatorDivision,
    model: nn.Module,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    all_pieces: Sequence[Piece],
) -> None:
    with random_states_kept(device):
        torch.manual_seed(0)  # equal parameters and cotangents in every check
        states = _make_states(division, model, device, dtype)
        operands = _Operands([_as_float(tensor.to(device), dtype) for tensor in tensors], states)
        whole = _Record(dtype)
        _run_whole(division, operands, whole)
        ranks = [_Record(dtype, cotangents=whole.cotangents) for _ in range(division.degree)]

        def run_rank(group: Any) -> None:
            _run_rank(division, operands, all_pieces, group, record=ranks[group.rank()])

        try:
            simulate(division.degree, run_rank, device)
        except InputError:
            _compare_results(division, whole, ranks)  # an operator before it may be the cause
            raise
        except RuntimeError as error:
            raise InputError(
                f"the divided model fails, but the whole one runs: {error_line(error)}. A forward pass that takes gradients "
                "itself (torch.autograd.grad) cannot be divided operator by operator: leave operator_parallel out."
            ) from error
    _compare_records(division, whole, ranks)


class _Operands(NamedTuple):
    """Operands shared by all runs: inputs, and parameters, buffers and constants by node name."""

    inputs: list[torch.Tensor]
    states: dict[str, torch.Tensor]


@dataclass
class _Record:
    """Values of a run by node of the whole graph, and gradients of parameters by name, all in one dtype."""

    dtype: torch.dtype
    values: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    cotangents: list[torch.Tensor | None] = field(default_factory=list)  # random; ranks take the whole run's
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                value.retain_grad()  # autograd keeps those of leaves alone
            self.values[node] = value


def _make_states(
    division: OperatorDivision, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    buffers = dict(model.named_buffers(remove_duplicate=False))  # a shared one under each name
    states = {}
    for node, origin in division.graph.origins.items():
        shape = node.meta["val"].shape
        if origin.kind == "parameter":
            value = (
                torch.rand(shape, device=device) + 0.5  # in [0.5, 1.5): neither zeros nor ones
                if len(shape) < 2
                else torch.randn(shape, device=device)  # scaled below: products keep the size of their inputs
            )
            states[node.name] = _as_float(value / shape[-1] ** 0.5 if len(shape) > 1 else value, dtype)
        elif origin.kind == "buffer":
            states[node.name] = _as_float(buffers[origin.name].detach().to(device), dtype)
        elif origin.kind == "constant":
            states[node.name] = _as_float(division.graph.captured.constants[origin.name].to(device), dtype)
    return states


class _Quiet(fx.Interpreter):
    """Runs a graph; random operators draw nothing, and values are recorded."""

    def __init__(
        self, graph: fx.Graph, calls: Mapping[int, Operator], values: Mapping[int, fx.Node], record: _Record
    ) -> None:
        super().__init__(nn.Module(), graph=graph)
        self._numbers = {node: number for number, node in enumerate(graph.nodes)}
        self._calls, self._values, self._record = calls, values, record

    def run_node(self, n: fx.Node) -> Any:
        op = self._calls.get(self._numbers[n])
        argument = self.fetch_args_kwargs_from_env(n)
        args, kwargs = fx.node.map_aggregate(argument, lambda value: _as_float(value, self._record.dtype))
        try:
            result = self._compute_result(n, op, args, kwargs)
        except InputError:
            raise
        except Exception as error:
            # A conversion is not an operator: name the one that it is for.
            users = (self._calls.get(self._numbers[user]) for user in n.users)
            where = op or next(filter(None, users), None)
            raise InputError(
                f"{where} is divided wrongly: it fails on pieces with {error_line(error)}."
            ) from error
        # An operator may return its argument: its result needs a gradient of its own.
        if op is not None and not op.pinned and any(result is argument for argument in args):
            result = result.view_as(result)
        value = self._values.get(self._numbers[n])
        if value is not None:
            self._record.keep(value, result)
        return result

    def _compute_result(self, n: fx.Node, op: Operator | None, args: Any, kwargs: Any) -> Any:
        if op is not None and is_random(op) and n.target is not operator.getitem:  # draws nothing
            return _without_chance(op, [value for value in args if not _is_group(value)], kwargs)
        if op is not None and n.target is op.call.operator:  # with its grad modes, in full precision
            return without_autocast(runnable(op, whole_rule(op.call))[0])(*args, **kwargs)
        return getattr(self, n.op)(without_autocast(n.target), args, kwargs)


def _as_float(value: Any, dtype: torch.dtype) -> Any:
    # Rounding to a lower precision would hide differences. The dtype arguments belong to casts.
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


def _is_group(value: Any) -> bool:
    return hasattr(value, "rank") and not isinstance(value, torch.Tensor)  # of processes or simulated


def _without_chance(op: Operator, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    names = op.call.argument_names
    for name in ("dropout_p", "p"):  # dropout at a rate of 0
        if name in names:
            arguments = dict(zip(names, args, strict=False)) | dict(kwargs) | {name: 0.0}
            return op.call.operator(**{key: value for key, value in arguments.items() if key in names})
    results = op.call.operator(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        return results.zero_()  # in place of random numbers, which differ by rank
    return type(results)(result.zero_() if isinstance(result, torch.Tensor) else result for result in results)


def _run_whole(division: OperatorDivision, operands: _Operands, record: _Record) -> None:
    graph, nodes = division.graph, list(division.graph.captured.graph.nodes)
    calls = {
        number: producer[0] for number, node in enumerate(nodes) if (producer := graph.producers.get(node))
    }
    # A node that gives a list or tuple is not the producer of its results: their getitem nodes are.
    calls |= {nodes.index(op.node): op for op in graph.operators}
    value_nodes = {number: node for number, node in enumerate(nodes) if node in graph.producers}
    arguments, parameters = [], {}  # in the order of the graph's placeholders; by name in the model
    for node, origin in graph.origins.items():
        if origin.kind == "input":
            arguments.append(operands.inputs[int(origin.name)])
            continue
        value = operands.states[node.name]
        if origin.kind == "parameter":
            value = parameters[origin.name] = value.clone().requires_grad_(graph.spec(node).requires_grad)
        arguments.append(value.clone() if origin.kind == "buffer" else value)  # the run may write to it
    results = _Quiet(graph.captured.graph, calls, value_nodes, record).run(*arguments)
    record.cotangents = [
        torch.randn_like(result) if isinstance(result, torch.Tensor) and result.requires_grad else None
        for result in results
    ]
    _run_backward(results, record.cotangents)
    record.parameters = {name: value.grad for name, value in parameters.items() if value.grad is not None}


def _run_backward(results: Sequence[Any], cotangents: Sequence[torch.Tensor | None]) -> None:
    pairs = [(result, grad) for result, grad in zip(results, cotangents, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])


def _run_rank(
    division: OperatorDivision,
    operands: _Operands,
    all_pieces: Sequence[Piece],
    group: Any,
    *,
    record: _Record,
) -> None:
    values, copies = _divide_operands(division, operands, group)
    for piece in all_pieces:
        under = f"{piece.path}." if piece.path else ""
        arguments = [
            group,
            *(copies[under + name] for name in piece.states),
            *(values[name] for name in piece.takes),
        ]
        results = _Quiet(piece.body.graph, piece.calls, piece.values, record).run(*arguments)
        values.update(zip(piece.gives, results, strict=True))
    need = ArgumentNeed(WHOLE, False)  # every rank uses the results in the same way
    outputs = [
        convert_placement(values[node.name], division.placement(node), need, group)
        for node in division.graph.outputs
    ]
    _run_backward(outputs, record.cotangents)
    for name, value in copies.items():
        if value.grad is not None:
            record.parameters[name] = total(value.grad, group) if name in division.summed else value.grad


def _divide_operands(
    division: OperatorDivision, operands: _Operands, group: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    values: dict[str, Any] = {}  # by name of the node
    copies: dict[str, torch.Tensor] = {}  # a rank's own parameters, buffers and constants, by their names
    for node, origin in division.graph.origins.items():
        if origin.kind == "input":
            values[node.name] = operands.inputs[int(origin.name)]
            continue
        value = operands.states[node.name].clone()
        if origin.kind == "parameter":
            placement = division.parameters.get(origin.name, WHOLE)
            if isinstance(placement, Shard):
                value = value.chunk(group.size(), placement.dim)[group.rank()].clone()
            value.requires_grad_(division.graph.spec(node).requires_grad)
        values[node.name] = copies[origin.name] = value
    return values, copies


def _compare_records(division: OperatorDivision, whole: _Record, ranks: Sequence[_Record]) -> None:
    _compare_results(division, whole, ranks)  # a wrong result makes wrong gradients, so results come first
    gradients = map(_read_gradient, whole.values.values())
    floor = gradient_floor([gradient for gradient in gradients if gradient is not None])
    for op, node, placement in reversed(list(_operator_results(division))):  # as the backward pass goes
        gradient = _read_gradient(whole.values.get(node))
        if gradient is not None:
            parts = [_read_gradient(rank.values.get(node)) for rank in ranks]
            layout = WHOLE if isinstance(placement, Partial) else placement  # whole on every rank
            _require_close(op, "gradient of the result", gradient, parts, placement=layout, floor=floor)
    _compare_parameters(division, whole, ranks, floor)


def _compare_results(division: OperatorDivision, whole: _Record, ranks: Sequence[_Record]) -> None:
    for op, node, placement in _operator_results(division):
        parts = [rank.values.get(node) for rank in ranks]  # None where a rank failed before it
        results = [part for part in parts if part is not None]
        if node not in whole.values or not results:
            continue
        shape = local_shape(tuple(whole.values[node].shape), placement, division.degree)
        for part in results:
            if tuple(part.shape) != shape:
                raise InputError(
                    f"{op} is divided wrongly: a rank's result has shape {tuple(part.shape)} instead of {shape}."
                )
        if placement == WHOLE or len(results) == len(parts):  # else a rank has failed
            _require_close(op, "result", whole.values[node].detach(), results, placement=placement, floor=0.0)


def _compare_parameters(
    division: OperatorDivision, whole: _Record, ranks: Sequence[_Record], floor: float
) -> None:
    users: dict[str, Operator] = {}
    for value, op, _ in division.uses():
        origin = division.graph.origins.get(value)
        if origin is not None:
            users.setdefault(origin.name, op)
    for name, gradient in whole.parameters.items():
        placement = division.parameters.get(name, WHOLE)
        parts = [rank.parameters.get(name) for rank in ranks]
        _require_close(users[name], f"gradient of {name}", gradient, parts, placement=placement, floor=floor)


def _operator_results(division: OperatorDivision) -> Iterator[tuple[Operator, fx.Node, Placement]]:
    for op in division.graph.operators:
        for number, node in enumerate(op.results):
            # Elements of an empty tensor are whatever its memory held.
            if node is not None and not op.name.startswith(("empty", "new_empty")):
                yield op, node, division.rules[op].outputs[number]


def _read_gradient(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None or not value.requires_grad else value.grad


def _require_close(
    op: Operator,
    what: str,
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor | None],
    *,
    placement: Placement,
    floor: float,
) -> None:
    tensors = [part.detach() for part in parts if part is not None]
    if not tensors:
        return  # the divided graph does not compute this value
    if len(tensors) < len(parts):
        raise InputError(f"{op} is divided wrongly: some ranks have no {what}.")
    results = [torch.cat(tensors, placement.dim)] if isinstance(placement, Shard) else tensors
    results = [torch.stack(tensors).sum(0)] if isinstance(placement, Partial) else results
    for tensor in results:
        error = relative_error(tensor, whole, floor=floor)
        if error > TOLERANCE:
            raise InputError(
                f"{op} is divided wrongly: its {what} differs by {error:.1e} relative to its largest value."
            )
