"""Templates: the legal combinations of methods, each once, before meshes and micro-batches multiply them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import Chosen, Registry, Resolved, clash, fold_plan, ordered, resolve
from atorch_ns.search._choices import Choices, axes_of
from atorch_ns.search._same import effective
from atorch_ns.search._wishes import Wishes
from atorch_ns.strategy import MODEL_AXES, Plan, Strategy

__all__ = [
    "MeshGroup",
    "Shape",
    "Template",
    "Templates",
    "find_templates",
    "mesh_groups",
    "steps_of",
]

MAX_COMBINATIONS = 4096
"""Combinations of methods that are looked at, however many plug-ins there are."""


Shape = tuple[int, ...]
"""Sizes of the axes ``data`` and ``zero``, then of those that divide the model, as
:data:`~atorch_ns.strategy.MODEL_AXES` has them."""


@dataclass(frozen=True)
class MeshGroup:
    """Meshes that differ only in the sizes of their axes, each larger than 1 in all or in none.

    Attributes:
        meshes: the choice that gives each :data:`Shape`.
    """

    meshes: dict[Shape, Chosen | None]

    @property
    def first(self) -> Chosen | None:
        """One of them, to resolve with."""
        return next(iter(self.meshes.values()))

    def has(self, axis: str) -> bool:
        """Whether an axis that divides the model is larger than 1."""
        return next(iter(self.meshes))[2 + MODEL_AXES.index(axis)] > 1


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


def find_templates(
    choices: Choices,
    cluster: Cluster,
    registry: Registry,
    wishes: Wishes,
    *,
    only: Collection[str] | None = None,
) -> Templates:
    """Every legal combination, the simplest of those that amount to the same.

    Args:
        choices: what they are put together from.
        cluster: to run on.
        registry: the methods there are.
        wishes: what must and may not be there.
        only: names of the methods that may be there; ``None`` for all.
    """
    combinations, left_out = _combinations(choices.kinds)
    combinations.sort(key=len)
    distinct: dict[Plan, Template] = {}
    same: list[tuple[Resolved, Template]] = []
    refused: dict[str, int] = {}
    to_come = {item.method.name for item in choices.passes.values() if item is not None}
    for number, group in enumerate(mesh_groups(choices.meshes)):
        try:
            completion = None if number == 0 else _Completion.of(group, cluster, registry)
        except StrategyError as error:
            refused[str(error)] = refused.get(str(error), 0) + len(combinations)
            continue
        for chosen in combinations:
            if not all(group.has(axis) for item in chosen for axis in axes_of(item)):
                continue
            resolved = None
            try:
                if completion is None:
                    resolved = resolve(Strategy(steps_of(chosen, group.first)), cluster, registry)
                    complete = resolved.chosen
                else:
                    complete = completion.complete(chosen)
            except StrategyError as error:
                refused[str(error)] = refused.get(str(error), 0) + 1
                continue
            if wishes.unmet(complete, to_come=to_come) is not None:
                continue
            if only is not None and any(item.method.name not in only for item in complete):
                continue
            plan = fold_plan(complete) if resolved is None else resolved.plan
            kind = _kind(effective(plan))
            if kind not in distinct:
                distinct[kind] = Template(chosen, plan, group, len(complete))
            elif (
                resolved is not None
            ):  # that an axis which nothing is sharded over changes nothing needs no row
                same.append((resolved, distinct[kind]))
    return Templates(tuple(distinct.values()), tuple(same), refused, left_out)


@dataclass(frozen=True)
class _Completion:
    """What ``resolve`` adds on one kind of mesh, so that it need not be asked for every combination there.

    What is written out in the end is resolved.

    Attributes:
        mesh: the methods that arrange the ranks.
        added: those that fill the roles which the mesh leaves empty.
    """

    mesh: tuple[Chosen, ...]
    added: tuple[Chosen, ...]

    @classmethod
    def of(cls, group: MeshGroup, cluster: Cluster, registry: Registry) -> _Completion:
        """Of a group of meshes.

        Raises:
            StrategyError: if such a mesh cannot be used at all.
        """
        alone = resolve(Strategy(steps_of((), group.first)), cluster, registry).chosen
        names = {group.first.method.name} if group.first is not None else set()
        return cls(
            tuple(item for item in alone if item.method.name in names),
            tuple(item for item in alone if item.method.name not in names),
        )

    def complete(self, chosen: tuple[Chosen, ...]) -> tuple[Chosen, ...]:
        """The methods of a strategy, in order.

        Raises:
            StrategyError: if two of them cannot stand together.
        """
        filled = {role for item in chosen for role in item.method.roles(item.config)}
        missing = tuple(
            item for item in self.added if not filled.intersection(item.method.roles(item.config))
        )
        for item in chosen:
            for other in (*self.mesh, *missing):
                reason = clash(item, other)
                if reason is not None:
                    names = f"{item.method.name} and {other.method.name}"
                    raise StrategyError(f"{names} cannot stand together: {reason}")
        return ordered((*self.mesh, *missing, *chosen))


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
    groups: dict[object, dict[Shape, Chosen | None]] = {}
    for item in meshes:
        plan = Plan() if item is None else item.method.plan(Plan(), item.config)
        data, zero = plan.size("data"), plan.size("zero")
        model = tuple(plan.size(name) for name in MODEL_AXES)
        others = tuple(name for name, size in plan.axes if size > 1 and name not in ("data", "zero"))
        key = (others, plan.rank_order, zero > 1, data > 1 and zero > 1, data * zero > 1 or not others)
        groups.setdefault(key, {}).setdefault((data, zero, *model), item)
    return [MeshGroup(meshes) for meshes in groups.values()]


def steps_of(chosen: Iterable[Chosen], *more: Chosen | None) -> list[tuple[str, object]]:
    """The entries of a strategy of these methods."""
    items = [item for item in (*more, *chosen) if item is not None]
    return [(item.method.name, item.config.as_json() or None) for item in items]


def _kind(plan: Plan) -> Plan:
    """The plan without what differs between the rows of a table."""
    axes = tuple((name, 0) for name, _ in plan.axes)
    return replace(plan, axes=tuple(sorted(axes)), num_micro_batches=1)
