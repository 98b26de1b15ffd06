"""Testing a whole plan: every distinct block of the model, divided and whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from atorch_ns.profile import repeated_blocks
from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.sharding._tensor_apply import RegionSpec, common_parent
from atorch_ns.sharding._tensor_plan import Layout
from atorch_ns.sharding._tensor_region import Division
from atorch_ns.sharding._tensor_regions import relative
from atorch_ns.sharding._tensor_sequence import StreamSpec
from atorch_ns.sharding._tensor_test import Tested, fits, runs_without_memory, self_test
from atorch_ns.sharding._tensor_trace import LayerGraph, ModuleCall
from atorch_ns.sharding._tensor_units import Unit, unit_for

__all__ = ["Failure", "PlanTest"]

_OWN = ("embedding_rowwise", "colwise_gather_output")
"""Styles that leave whole results: a layer that has one is right whatever stands around it."""


@dataclass(frozen=True)
class Failure:
    """A unit that computes something else when it is divided.

    Attributes:
        path: of the unit.
        reason: what showed it, as a clause.
        alike: the paths of all units that are like it, its own too.
    """

    path: str
    reason: str
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """A unit's path, and those of all modules that are like it."""

    path: str
    alike: tuple[str, ...]


class PlanTest:
    """Tests layouts of one model on one tensor group.

    Args:
        model: whole; not changed.
        graph: how its layers are connected.
        division: this rank's place; without a mesh, or on a fake process group, shapes alone are tested.
        really: whether to compute, and not go by shapes alone.
    """

    def __init__(self, model: nn.Module, graph: LayerGraph, division: Division, *, really: bool) -> None:
        self._model = model
        self._graph = graph
        self._division = division
        self._really = really

    def region(self, unit: Unit, layout: Layout, regions: list[RegionSpec]) -> bool:
        """Whether a unit is right with a layout of its own paths."""
        return not self._really or self_test(unit, layout, regions, self._division).passed

    def whole(
        self, layout: Layout, regions: Iterable[RegionSpec], stream: StreamSpec | None = None
    ) -> tuple[Failure | None, set[str]]:
        """The first unit that fails, if any; and the whole parameters of which ranks have partial gradients."""
        specs = list(regions)
        partial: set[str] = set()
        for place in self._places(layout, calls=stream is not None):
            inside = stream is not None and stream.holds(place.path)
            its_stream = replace(stream, chains=(("",),)) if stream is not None and inside else None
            tested = self._one(place.path, layout, specs, its_stream)
            if isinstance(tested, Failure):
                return replace(tested, alike=place.alike), partial
            partial |= {
                ".".join(filter(None, (path, name))) for path in place.alike for name in tested.partial
            }
        return None, partial

    def _one(
        self, path: str, layout: Layout, regions: list[RegionSpec], stream: StreamSpec | None
    ) -> Tested | Failure:
        unit = unit_for(self._model, self._graph, path)
        local = layout.within(unit.path)
        specs = [_within(spec, unit.path) for spec in regions if _inside(spec.rows[0], unit.path)]
        refused = fits(unit, local, specs, self._division.degree, stream)
        # Code that looks at values, as at a router's, fails on fake tensors undivided too: only values tell of it.
        blind = refused is not None and not runs_without_memory(unit)
        if refused is not None and not blind:
            return Failure(unit.path, f"it fails with {refused}")
        if not self._really:
            return Tested(0.0, "")
        try:
            tested = self_test(unit, local, specs, self._division, stream)
        except Exception as error:  # all ranks run the same code on the same values
            if not blind:
                raise
            return Failure(unit.path, f"it fails with {type(error).__name__}: {error}".splitlines()[0])
        if tested.passed:
            return tested
        return Failure(unit.path, f"{tested.where} is off by {tested.error:.2g} of its size")

    def _places(self, layout: Layout, *, calls: bool) -> list[_Place]:
        """The distinct blocks that hold divided layers, and what holds those outside blocks.

        With ``calls`` blocks are distinct too that get other arguments: the first may get one tensor twice.
        """
        layers = [path for path, layer in layout.layers.items() if layer.style not in _OWN]
        found: dict[object, list[str]] = {}
        covered: set[str] = set()
        for block in repeated_blocks(self._model):
            mine = [path for path in layers if path.startswith(f"{block.name}.")]
            if not mine or block.name not in self._graph.calls:
                continue
            covered |= set(mine)
            inner = layout.within(block.name)
            shapes = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
            given = _arguments(self._graph.calls[block.name]) if calls else ()
            numbers = (inner.attributes, inner.narrow_inputs)
            key = (type(block.module), tuple(inner.layers.items()), numbers, shapes, given)
            found.setdefault(key, []).append(block.name)
        places = [_Place(paths[0], tuple(paths)) for paths in found.values()]
        rest = [path for path in layers if path not in covered]
        if rest:
            path = unit_for(self._model, self._graph, common_parent(rest)).path
            places.append(_Place(path, (path,)))
        return places


def _arguments(call: ModuleCall) -> tuple[object, ...]:
    """The shapes of a call's tensors, and which of its arguments hold the same ones."""
    values = (*call.args, *call.kwargs.values())
    tensors = tensors_in(values)
    place = {id(tensor): number for number, tensor in enumerate(tensors)}
    held = tuple(tuple(place[id(tensor)] for tensor in tensors_in(value)) for value in values)
    return tuple(tuple(tensor.shape) for tensor in tensors), held


def _inside(path: str, parent: str) -> bool:
    return not parent or path.startswith(f"{parent}.")


def _within(spec: RegionSpec, parent: str) -> RegionSpec:
    return RegionSpec(
        tuple(relative(path, parent) for path in spec.columns),
        tuple(relative(path, parent) for path in spec.rows),
        random=spec.random,
    )
