"""Whether torch's schedules may compute a stage's gradients of inputs and of weights apart."""

from __future__ import annotations

from atorch_ns.pipeline._crossing import stage_parameters
from atorch_ns.pipeline._graph import CallGraph, Value
from atorch_ns.pipeline._pass import StageRange

__all__ = ["backward_splits"]


def backward_splits(graph: CallGraph, stage: StageRange) -> bool:
    """Whether every weight of a stage works on what the stage receives.

    torch finds the weights' part of a backward pass from what the inputs' part has passed through
    (``stage_backward_input`` and ``stage_backward_weight``). A weight whose work does not meet the received tensors
    inside the stage, such as the embedding of a decoder's own tokens, would get no gradient, silently. The first
    stage is always right: torch does its whole backward pass at once.
    """
    if stage.received is None:
        return True
    if stage_parameters(graph, stage.begin, stage.end, received=stage.received, sent=stage.sent):
        return False
    meets = {one.value for one in stage.received.carried if one.spec.requires_grad}
    for number, value in enumerate(graph.values):
        if any(source in meets for source in _sources(graph, stage, value)):
            meets.add(number)
    return all(
        any(value in meets for value in call.arguments) for call in graph.calls[stage.begin : stage.end]
    )


def _sources(graph: CallGraph, stage: StageRange, value: Value) -> tuple[int, ...]:
    if not value.is_output:
        return value.inputs
    return graph.calls[value.call].arguments if stage.begin <= value.call < stage.end else ()
