"""Templates: the legal combinations of methods, each once, before meshes and micro-batches multiply them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import Chosen, Registry, Resolved, clash, resolve
from atorch_ns.search._choices import Choices
from atorch_ns.search._same import effective
from atorch_ns.search._wishes import Wishes
from atorch_ns.strategy import DATA_AXES, Plan, Strategy

__all__ = ["MeshGroup", "Template", "Templates", "find_templates", "mesh_groups", "steps_of"]

MAX_COMBINATIONS = 4096
"""Combinations of methods that are looked at, however many plug-ins there are."""


@dataclass(frozen=True)
class MeshGroup:
    """Meshes that differ only in the sizes of ``data`` and ``zero``, each larger than 1 in all or in none.

    Attributes:
        meshes: the choice that gives each ``(data, zero)``.
    """

    meshes: dict[tuple[int, int], Chosen | None]

    @property
    def first(self) -> Chosen | None:
        """One of them, to resolve with."""
        return next(iter(self.meshes.values()))


@dataclass(frozen=True)
class Template:
    """A combination of methods on one kind of mesh.

    Attributes:
        chosen: the methods, without mesh and micro-batches.
        plan: what they decide, on one mesh of the group, in one pass.
        group: the meshes it is tried on.
        num_methods: methods of the resolved strategy, those added by themselves included.
    """

    chosen: tuple[Chosen, ...]
    plan: Plan
    group: MeshGroup
    num_methods: int


@dataclass(frozen=True)
class Templates:
    """All of them.

    Attributes:
        distinct: those that amount to something of their own.
        same: those that amount to another: the resolved strategy, and the template it equals.
        refused: reasons of combinations that ``resolve`` refused, and how many.
        num_left_out: combinations beyond the limit.
    """

    distinct: tuple[Template, ...]
    same: tuple[tuple[Resolved, Template], ...]
    refused: dict[str, int]
    num_left_out: int


def find_templates(choices: Choices, cluster: Cluster, registry: Registry, wishes: Wishes) -> Templates:
    """Every legal combination, the simplest of those that amount to the same."""
    combinations, left_out = _combinations(choices.kinds)
    distinct: dict[Plan, Template] = {}
    same: list[tuple[Resolved, Template]] = []
    refused: dict[str, int] = {}
    to_come = {item.method.name for item in choices.passes.values() if item is not None}
    for number, group in enumerate(mesh_groups(choices.meshes)):
        for chosen in sorted(combinations, key=len):
            try:
                resolved = resolve(Strategy(steps_of(chosen, group.first)), cluster, registry)
            except StrategyError as error:
                refused[str(error)] = refused.get(str(error), 0) + 1
                continue
            if wishes.unmet(resolved.chosen, to_come=to_come) is not None:
                continue
            kind = _kind(effective(resolved.plan))
            if kind not in distinct:
                distinct[kind] = Template(chosen, resolved.plan, group, len(resolved.chosen))
            elif number == 0:  # that an axis which nothing is sharded over changes nothing needs no row
                same.append((resolved, distinct[kind]))
    return Templates(tuple(distinct.values()), tuple(same), refused, left_out)


def _combinations(kinds: Sequence[tuple[Chosen | None, ...]]) -> tuple[list[tuple[Chosen, ...]], int]:
    found: list[tuple[Chosen, ...]] = [()]
    left_out = 0
    for alternatives in kinds:
        grown = [
            chosen if item is None else (*chosen, item)
            for chosen in found
            for item in alternatives
            if item is None or all(clash(item, other) is None for other in chosen)
        ]
        grown.sort(key=len)
        left_out += max(0, len(grown) - MAX_COMBINATIONS)
        found = grown[:MAX_COMBINATIONS]
    return found, left_out


def mesh_groups(meshes: Iterable[Chosen | None]) -> list[MeshGroup]:
    """The meshes by kind, in the order in which they were offered."""
    groups: dict[object, dict[tuple[int, int], Chosen | None]] = {}
    for item in meshes:
        plan = Plan() if item is None else item.method.plan(Plan(), item.config)
        data, zero = plan.size("data"), plan.size("zero")
        others = tuple(axis for axis in plan.axes if axis[0] not in DATA_AXES)
        key = (others, plan.rank_order, zero > 1, data > 1 and zero > 1)
        groups.setdefault(key, {}).setdefault((data, zero), item)
    return [MeshGroup(meshes) for meshes in groups.values()]


def steps_of(chosen: Iterable[Chosen], *more: Chosen | None) -> list[tuple[str, object]]:
    """The entries of a strategy of these methods."""
    items = [item for item in (*more, *chosen) if item is not None]
    return [(item.method.name, item.config.as_json() or None) for item in items]


def _kind(plan: Plan) -> Plan:
    """The plan without what differs between the rows of a table."""
    axes = tuple((name, 0 if name in DATA_AXES else size) for name, size in plan.axes)
    return replace(plan, axes=tuple(sorted(axes)), num_micro_batches=1)
