"""Which rank holds which parameters of a model that is cut, decided before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from atorch_ns.pipeline._crossing import Crossing, plan_crossings, stage_parameters
from atorch_ns.pipeline._graph import CallGraph
from atorch_ns.pipeline._pass import StageRange
from atorch_ns.profile import NamedModule

__all__ = ["Division", "divide_parameters", "ranges"]


@dataclass(frozen=True, kw_only=True)
class Division:
    """Who holds what.

    Attributes:
        ranges: the stages.
        rank_of: the rank (along the pipeline) of each stage.
        unit_stages: the stages that call a unit, by its path; the first stage for units that nobody calls.
        parameter_stages: the stages that need a parameter, by the first of its names.
    """

    ranges: tuple[StageRange, ...]
    rank_of: tuple[int, ...]
    unit_stages: Mapping[str, tuple[int, ...]]
    parameter_stages: Mapping[str, tuple[int, ...]]

    def ranks_holding(self, parameter: str) -> tuple[int, ...]:
        """The ranks that hold a parameter, rising."""
        return tuple(sorted({self.rank_of[stage] for stage in self.parameter_stages[parameter]}))

    @property
    def shared_on_rank(self) -> tuple[str, ...]:
        """Parameters that several stages of one rank need."""
        ranks = {name: [self.rank_of[s] for s in stages] for name, stages in self.parameter_stages.items()}
        return tuple(name for name, holders in ranks.items() if len(set(holders)) < len(holders))

    @property
    def shared(self) -> tuple[str, ...]:
        """Parameters that several ranks hold."""
        return tuple(name for name in self.parameter_stages if len(self.ranks_holding(name)) > 1)


def ranges(graph: CallGraph, cuts: Sequence[int]) -> tuple[StageRange, ...]:
    """The stages that cuts make of a pass."""
    crossings: list[Crossing | None] = [None, *plan_crossings(graph, cuts), None]
    edges = [0, *cuts, len(graph.calls)]
    return tuple(
        StageRange(
            begin=edges[stage],
            end=edges[stage + 1],
            received=crossings[stage],
            sent=crossings[stage + 1],
        )
        for stage in range(len(cuts) + 1)
    )


def divide_parameters(
    model: nn.Module,
    units: Sequence[NamedModule],
    graph: CallGraph,
    cuts: Sequence[int],
    rank_of: Sequence[int],
) -> Division:
    """Decides what every stage holds.

    Args:
        model: whole.
        units: its units.
        graph: a traced pass.
        cuts: where it is cut.
        rank_of: the rank of each stage.
    """
    stages = ranges(graph, cuts)
    callers: dict[str, set[int]] = {unit.name: set() for unit in units}
    for number, stage in enumerate(stages):
        for call in graph.calls[stage.begin : stage.end]:
            callers[call.path].add(number)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    needed: dict[str, set[int]] = {name: set() for name in names.values()}
    for unit in units:
        for parameter in unit.module.parameters():
            needed[names[id(parameter)]] |= callers[unit.name]
    for number, stage in enumerate(stages):
        between = stage_parameters(graph, stage.begin, stage.end, received=stage.received, sent=stage.sent)
        for name in between:
            needed[name].add(number)
    return Division(
        ranges=stages,
        rank_of=tuple(rank_of),
        unit_stages={path: tuple(sorted(found or {0})) for path, found in callers.items()},
        parameter_stages={name: tuple(sorted(found or {0})) for name, found in needed.items()},
    )
