"""Where the sequence may stay divided between divided layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.sharding._tensor_apply import RegionSpec
from atorch_ns.sharding._tensor_check import Failure, PlanTest
from atorch_ns.sharding._tensor_plan import Layout
from atorch_ns.sharding._tensor_sequence import StreamSpec, stream_of
from atorch_ns.sharding._tensor_trace import LayerGraph

__all__ = ["check_partial", "choose_stream"]


def choose_stream(
    model: nn.Module,
    test: PlanTest,
    graph: LayerGraph,
    layout: Layout,
    regions: Sequence[RegionSpec],
    dim: int,
) -> tuple[StreamSpec, set[str]]:
    """Where the sequence can be divided, and the parameters that then have partial gradients; collective.

    Hidden states are in pieces only inside a run of blocks that hand them on untouched: code between two runs,
    such as a mean over the sequence or a learned scale, sees them whole.

    Raises:
        InputError: if no block can be divided, or one computes something else on pieces.
    """
    chains = _chains(graph, regions, dim)
    failure = Failure("", "it repeats no block whose layers are all divided")
    kept = [(path, why) for chain in chains for path in chain if (why := graph.blocks.kept.get(path))]
    if kept:
        path, why = kept[0]
        raise InputError(
            f"sequence=True cannot be used with {type(model).__name__}: {path} would see a piece of the sequence, "
            f"and its hidden states leave it beside its output: {why}. Return what other code needs, or set "
            "sequence=False."
        )
    for tight in (True, False):
        if not chains:
            break
        stream = StreamSpec(tuple(chains), dim=dim, tight=tight)
        found, partial = test.whole(layout, regions, stream)
        if found is None:
            return stream, partial
        failure = found
    raise InputError(
        f"sequence=True cannot be used with {type(model).__name__}: with its sequence divided, "
        f"{failure.path or 'the model'} does not compute what it does whole: {failure.reason}. Set sequence=False."
    )


def check_partial(graph: LayerGraph, partial: Iterable[str], stream: StreamSpec | None) -> None:
    """Checks that a gradient that is summed over ranks has no part that every rank has whole.

    Raises:
        InputError: for a parameter that code outside the divided blocks uses as well.
    """
    for name in sorted(partial):
        users = graph.blocks.users.get(name, set())
        inside = {path for path in users if (stream.holds(path) if stream is not None and path else path)}
        outside = sorted(users - inside)
        if not inside or not outside:
            continue
        advice = "Set sequence=False, or use" if stream is not None else "Use"
        raise InputError(
            f"tensor_parallel cannot sum the gradient of {name} over ranks: in {min(inside)} each rank computes a "
            f"part of it, and {outside[0] or 'code outside the blocks'} uses it too, where each rank computes it "
            f"whole. {advice} a parameter of its own there."
        )


def _chains(graph: LayerGraph, regions: Iterable[RegionSpec], dim: int) -> list[tuple[str, ...]]:
    """Runs of blocks that hold divided layers and hand their first output to the next one's stream."""
    rows = [spec.rows[0] for spec in regions]
    chains: list[list[str]] = []
    for run in graph.blocks.runs:
        before = None
        for path in run:
            if not any(row.startswith(f"{path}.") for row in rows):
                before = None
            elif before is not None and _hands_on(graph, before, path, dim):
                chains[-1].append(path)
                before = path
            else:
                chains.append([path])
                before = path
    return [tuple(chain) for chain in chains]


def _hands_on(graph: LayerGraph, before: str, path: str, dim: int) -> bool:
    call = graph.calls[path]
    stream = stream_of(call.args, call.kwargs, dim)
    siblings = before.rpartition(".")[0] == path.rpartition(".")[0]
    return siblings and stream is not None and stream is graph.blocks.results.get(before)
