"""Crossings: the tensors that are sent from stage to stage, and where a model can be cut.

A stage runs the model's own code from the start, with stand-ins for other stages' units. A tensor that it
needs from before its first call reaches that code in one of two ways:

* as an **output**: the stand-in of its unit returns the received tensor. Results of the code between units
  are computed again from it on every stage that needs them.
* as an **argument** of the first call of the stage: the code has computed it from stand-ins, and the received
  tensor is copied into it. So the sum of a residual stream crosses a cut as one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from atorch_ns.errors import InputError
from atorch_ns.pipeline.cut.graph import CallGraph, TensorSignature


@dataclass(frozen=True, kw_only=True)
class Carried:
    """One tensor that crosses a cut.

    Attributes:
        value: number of the tensor in the graph.
        spec: shape and dtype, and whether a gradient comes back.
        call: the call that returned it; for an argument the first call after the cut.
        leaf: index among the tensors of that output or of those arguments.
        is_argument: whether it reaches the stage's code as an argument.
        in_pieces: whether each rank of the same stage sends a piece of it. ``spec`` then describes the piece.
    """

    value: int
    spec: TensorSignature
    call: int
    leaf: int
    is_argument: bool = False
    in_pieces: bool = False


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """All tensors that cross one cut.

    Attributes:
        cut: the call before which the model is cut.
        carried: the tensors, in the order in which they are sent.
    """

    cut: int
    carried: tuple[Carried, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes sent in a forward pass of one micro-batch."""
        return sum(tensor.spec.num_bytes for tensor in self.carried)


def refused_cuts(graph: CallGraph) -> dict[int, str]:
    """The positions where the model cannot be cut, each with the reason."""
    problems: dict[int, str] = {}
    for cut in range(1, len(graph.calls)):
        problem = _cut_problem(graph, cut)
        if not problem:
            try:
                _find_crossing(graph, cut, ())
            except InputError as error:
                problem = str(error)
        if problem:
            problems[cut] = problem
    return problems


def plan_crossings(graph: CallGraph, cuts: Sequence[int]) -> tuple[Crossing, ...]:
    """The crossing of each cut.

    A tensor from before an earlier cut that a later cut needs crosses both cuts.

    Raises:
        InputError: if the model cannot be cut there.
    """
    crossings: list[Crossing] = []
    transit: set[int] = set()  # outputs from before this cut that later stages receive through it
    for index in range(len(cuts) - 1, -1, -1):  # later cuts decide what earlier ones forward
        cut = cuts[index]
        problem = _cut_problem(graph, cut)
        if problem:
            raise InputError(f"the model cannot be cut before {graph.calls[cut].path}: {problem}")
        crossing = _find_crossing(graph, cut, transit)
        crossings.append(crossing)
        before = cuts[index - 1] if index else 0
        outputs = {tensor.value for tensor in crossing.carried if not tensor.is_argument}
        transit = {value for value in outputs if graph.values[value].call < before}
    return tuple(reversed(crossings))


def stage_parameters(
    graph: CallGraph, begin: int, end: int, *, received: Crossing | None, sent: Crossing | None
) -> frozenset[str]:
    """Names of the parameters that the code between a stage's units needs, without those of its units.

    Args:
        begin, end: the stage's calls are ``begin`` to ``end - 1``.
        received: crossing of the cut before it; ``None`` for the first stage.
        sent: crossing of the cut after it; ``None`` for the last stage.
    """
    waiting = [value for call in graph.calls[begin:end] for value in call.arguments]
    waiting += (*graph.results, *graph.shown) if sent is None else [tensor.value for tensor in sent.carried]
    known_values = {tensor.value for tensor in received.carried} if received else set()  # not computed here
    names: set[str] = set()
    while waiting:
        number = waiting.pop()
        if number in known_values:
            continue
        known_values.add(number)
        value = graph.values[number]
        names.update(value.parameters)
        if not value.is_output:
            waiting += value.inputs
    return frozenset(names)


def _find_crossing(graph: CallGraph, cut: int, transit: Iterable[int]) -> Crossing:
    alive = graph.alive_at(cut)
    first = graph.calls[cut].arguments
    outputs = set(transit)
    # Code after the first call recomputes the values that it reads, from outputs that cross.
    for value in alive:
        if value not in first:
            sources = graph.sources[value]
            if sources is None:
                raise InputError(_describe_unfollowed(graph, value))
            outputs |= sources
    # Arguments of the first call cross as they are, or as the outputs that they come from if these add less.
    arguments = []
    for value in alive:
        if value in first:
            sources = graph.sources[value]
            if sources is None and _find_hidden_source(graph, value):
                raise InputError(_describe_unfollowed(graph, value))
            if sources is not None and _num_bytes(graph, sources - outputs) <= _num_bytes(graph, [value]):
                outputs |= sources
            else:
                arguments.append(value)  # it is copied into what the code computes from stand-ins
    tensors = [
        Carried(value=number, spec=_carried_spec(graph, number), call=value.call, leaf=value.leaf)
        for number in sorted(outputs)  # sender and receiver use one order
        for value in (graph.values[number],)
    ]
    tensors += [
        Carried(
            value=number,
            spec=_carried_spec(graph, number),
            call=cut,
            leaf=first.index(number),
            is_argument=True,
        )
        for number in arguments
    ]
    return Crossing(cut=cut, carried=tuple(tensors))


def _carried_spec(graph: CallGraph, number: int) -> TensorSignature:
    # With zeros in place of no gradient, optimizers would decay weights that one process leaves alone.
    spec = graph.values[number].spec
    return replace(spec, requires_grad=spec.requires_grad and number in graph.trained)


def _num_bytes(graph: CallGraph, values: Collection[int]) -> int:
    return sum(graph.values[value].spec.num_bytes for value in values)


def _cut_problem(graph: CallGraph, cut: int) -> str:
    if cut in graph.sealed:
        return (
            f"{graph.calls[cut].path} is called by a torch.autograd.Function of the model's own, which computes gradients "
            "itself and cannot do so across stages. Cut before or after it"
        )
    for position, value in graph.reads:
        if position <= cut:  # later stages would run this code on zeros
            path = graph.calls[graph.values[value].last_call].path
            return (
                f"the model's code looks into a value that {path} computes (.item(), bool(), a mask) and goes on "
                "according to it, which stages after it could not do. Cut before that, or compute without "
                "looking (torch.where)"
            )
    return ""


def _describe_unfollowed(graph: CallGraph, number: int) -> str:
    value = graph.values[number]
    hidden = _find_hidden_source(graph, number)
    if hidden:
        return (
            f"the model reads {hidden} after the cut, where only the stage that has {_unit_of(graph, hidden)} knows "
            "it. Return it from that module's forward, and let the model's code pass it on"
        )
    return (
        f"a tensor of shape {list(value.spec.shape)} that depends on {graph.calls[value.last_call].path} is used "
        "after the cut, and the code that made it cannot be run again on the next stage (a module changed it in "
        "place, or it was made outside of torch's functions)"
    )


def _find_hidden_source(graph: CallGraph, number: int) -> str:
    waiting, visited_ids = [number], set()  # back over the code between units
    while waiting:
        index = waiting.pop()
        if index in visited_ids:
            continue
        visited_ids.add(index)
        value = graph.values[index]
        if value.hidden:
            return value.hidden
        if not value.is_output:
            waiting += value.inputs
    return ""


def _unit_of(graph: CallGraph, hidden: str) -> str:
    # A hidden value is described by its path, or by the words of Follower._hidden_value.
    inside = (
        path for path in graph.paths if hidden.startswith(f"{path}.") or hidden.endswith(f" {path} makes")
    )
    return next(inside, "it")
