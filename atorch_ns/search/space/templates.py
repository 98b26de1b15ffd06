"""Templates: the legal combinations of methods, each once, before meshes and micro-batches multiply them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import Chosen, Method, MethodConfig, Registry, Resolved, clash, ordered, resolve
from atorch_ns.method.method import fit_config
from atorch_ns.profile import Profile
from atorch_ns.search.space.constraints import Constraints, why_not
from atorch_ns.search.space.equivalence import canonical
from atorch_ns.strategy import MODEL_AXES, Plan, Strategy

EXCLUDED = "it is excluded."


@dataclass(frozen=True)
class Choices:
    """The alternatives from which strategies are combined.

    Attributes:
        kinds: alternatives of each method that changes the training step; ``None`` stands for its absence.
        meshes: alternatives of the method that arranges the ranks; ``(None,)`` where nothing is arranged.
        micro_batches: alternatives by number of micro-batches, ``None`` for one without a method.
        refused: methods that are left out, each with the reason.
        options: options for each axis that divides the model; ``None`` for the default method.
    """

    kinds: tuple[tuple[Chosen | None, ...], ...]
    meshes: tuple[Chosen | None, ...]
    micro_batches: dict[int, Chosen | None]
    refused: dict[str, str]
    options: dict[str, tuple[Chosen | None, ...]] = field(default_factory=dict)


def find_choices(
    registry: Registry, profile: Profile, cluster: Cluster, constraints: Constraints, *, base: Strategy | None
) -> Choices:
    """The alternatives of every method.

    They are the method's ``options``, or the user's config. A base strategy adds its configs and excludes
    other methods. Methods that arrange ranks or split the batch are recognised by their changes to a plan.
    """
    kinds: list[tuple[Chosen | None, ...]] = []
    meshes: tuple[Chosen | None, ...] = (None,)
    micro_batches: dict[int, Chosen | None] = {1: None}
    refusals: dict[str, str] = {}
    options: dict[str, tuple[Chosen | None, ...]] = {}
    for method in registry:
        if base is not None and not any(name in base for name in (method.name, *method.aliases)):
            continue
        configs, reason = _method_configs(method, profile, cluster, constraints, base=base)
        if reason is not None and (not configs or reason != EXCLUDED):
            refusals[method.name] = reason
        if not configs:
            continue
        items = tuple(Chosen(method, config) for config in configs)
        must = constraints.requires(method.name) or base is not None
        changes = set().union(*(_changed_fields(item) for item in items))  # which tells the kind of method
        if changes and changes <= {"axes", "rank_order"}:
            meshes = items
        elif changes <= {*MODEL_AXES} and not must and len(axes := _default_model_axes(items)) == 1:
            options[axes.pop()] = (None, *items)
        elif changes == {"num_micro_batches"}:
            micro_batches = {item.method.plan(Plan(), item.config).num_micro_batches: item for item in items}
            if not must:
                micro_batches = {1: None, **micro_batches}
        else:
            kinds.append(items if must else (None, *items))
    return Choices(tuple(kinds), meshes, micro_batches, refusals, options)


def _default_model_axes(items: Sequence[Chosen]) -> set[str]:
    # Axes of methods that ``resolve`` adds by default where a mesh has the axis.
    return {axis for item in items if item.method.default_for is not None for axis in axes_of(item)}


def _method_configs(
    method: Method[Any],
    profile: Profile,
    cluster: Cluster,
    constraints: Constraints,
    *,
    base: Strategy | None,
) -> tuple[list[MethodConfig], str | None]:
    user_config = constraints.fixed(method.name)
    if user_config is not None:
        options: Sequence[MethodConfig] = [user_config]
    else:
        options = [*_base_configs(method, base), *method.options(profile, cluster)]
        if not options and constraints.requires(method.name):
            options = [method.Config()]
    is_free = user_config is None and base is None and not constraints.requires(method.name)
    usable: list[MethodConfig] = []
    reason = None  # why the last config was left out
    for config in options:
        if constraints.forbids(method.name, config):
            reason = EXCLUDED
            continue
        if is_free and method.default_for is not None and config == method.Config():
            continue  # `resolve` adds it wherever it is needed
        problem = why_not(method, config, cluster, profile)
        if problem is not None:
            reason = problem
        elif (here := fit_config(method, config, cluster)) not in usable:
            usable.append(here)
    return usable, reason


def _base_configs(method: Method[Any], base: Strategy | None) -> list[MethodConfig]:
    if base is None:
        return []
    names = (method.name, *method.aliases)
    return [method.Config.model_validate(base[name]) for name in names if name in base]


def axes_of(item: Chosen) -> tuple[str, ...]:
    """The axes that a method divides the model along; empty for most."""
    roles = (role for role in item.method.roles(item.config) if role.startswith("axis:"))
    axes = (role.removeprefix("axis:") for role in roles)
    return tuple(axis for axis in axes if axis in MODEL_AXES)


def _changed_fields(item: Chosen) -> set[str]:
    before = Plan()
    after = item.method.plan(before, item.config)
    return {field.name for field in fields(Plan) if getattr(after, field.name) != getattr(before, field.name)}


MAX_COMBINATIONS = 4096  # maximum combinations of methods, however many plug-ins there are


Shape = tuple[int, ...]
"""Sizes of the axes ``data`` and ``zero``, then of those that divide the model, as
:data:`~atorch_ns.strategy.MODEL_AXES` has them."""


@dataclass(frozen=True)
class MeshGroup:
    """Meshes that differ only in the sizes of their axes, each larger than 1 in all or in none.

    Attributes:
        meshes: the choice of mesh by :data:`Shape`.
    """

    meshes: dict[Shape, Chosen | None]

    @property
    def first(self) -> Chosen | None:
        """The first mesh, to resolve with."""
        return next(iter(self.meshes.values()))

    def has(self, axis: str) -> bool:
        """Returns whether an axis that divides the model is larger than 1."""
        return next(iter(self.meshes))[2 + MODEL_AXES.index(axis)] > 1


@dataclass(frozen=True)
class Template:
    """A combination of methods on one kind of mesh.

    Attributes:
        chosen: the methods, without mesh and micro-batches.
        plan: the plan on one mesh of the group, with one micro-batch.
        group: the meshes on which it is tried.
    """

    chosen: tuple[Chosen, ...]
    plan: Plan
    group: MeshGroup


@dataclass(frozen=True)
class Templates:
    """All templates of a search.

    Attributes:
        distinct: templates of which no two have the same effect.
        same: strategies with the effect of a simpler one: the resolved strategy, and the template it equals.
        refused: reasons for which ``resolve`` refused combinations, and the number of each.
        num_left_out: number of combinations beyond the limit.
    """

    distinct: tuple[Template, ...]
    same: tuple[tuple[Resolved, Template], ...]
    refused: dict[str, int]
    num_left_out: int


def find_templates(
    choices: Choices,
    cluster: Cluster,
    registry: Registry,
    constraints: Constraints,
    *,
    only: Collection[str] | None = None,
) -> Templates:
    """Returns every legal combination (of ``only`` if given), the simplest of those with the same effect."""
    combinations, left_out = _build_combinations(choices.kinds)
    combinations.sort(key=len)  # of strategies with the same effect the simplest comes first
    distinct: dict[Plan, Template] = {}
    same: list[tuple[Resolved, Template]] = []
    refusals: dict[str, int] = {}
    to_come = {item.method.name for item in choices.micro_batches.values() if item is not None}
    # On the first group combinations are resolved, so that those with the effect of a simpler one can be
    # reported. On the others the methods that ``resolve`` would add are found once.
    for number, group in enumerate(mesh_groups(choices.meshes)):
        try:
            completion = None if number == 0 else _Completion.of(group, cluster, registry)
        except StrategyError as error:
            refusals[str(error)] = refusals.get(str(error), 0) + len(combinations)
            continue
        plans: dict[tuple[int, ...], Plan] = {}  # plans by the methods that a combination begins with
        for combination in combinations:
            if not all(group.has(axis) for item in combination for axis in axes_of(item)):
                continue  # the group lacks an axis along which a method divides
            resolution = None
            try:
                if completion is None:
                    resolution = resolve(Strategy(steps_of(combination, group.first)), cluster, registry)
                    complete = resolution.chosen
                else:
                    complete = completion.complete(combination)
            except StrategyError as error:
                refusals[str(error)] = refusals.get(str(error), 0) + 1
                continue
            if constraints.violation(complete, to_come=to_come) is not None:
                continue
            if only is not None and any(item.method.name not in only for item in complete):
                continue  # with a method that the base strategy does not have
            plan = _fold_plan_cached(complete, plans) if resolution is None else resolution.plan
            kind = _plan_kind(canonical(plan))
            if kind not in distinct:
                distinct[kind] = Template(combination, plan, group)
            elif resolution is not None:
                # An axis over which nothing is sharded changes nothing, so it gets no row.
                same.append((resolution, distinct[kind]))
    return Templates(tuple(distinct.values()), tuple(same), refusals, left_out)


def _fold_plan_cached(methods: Iterable[Chosen], plans: dict[tuple[int, ...], Plan]) -> Plan:
    # As ``fold_plan``, with the plans of all beginnings kept. Combinations of one group are made of the same
    # objects, which live as long as ``plans``, so identities are keys.
    plan = Plan()
    key: tuple[int, ...] = ()
    for item in methods:
        key = (*key, id(item))
        if key not in plans:
            plans[key] = item.method.plan(plan, item.config)
        plan = plans[key]
    return plan


@dataclass(frozen=True)
class _Completion:
    # What ``resolve`` adds on one kind of mesh. Strategies that become candidates are resolved in the end.
    mesh: tuple[Chosen, ...]  # the methods that arrange the ranks
    added: tuple[Chosen, ...]  # the methods that fill the roles which the mesh leaves empty

    @classmethod
    def of(cls, group: MeshGroup, cluster: Cluster, registry: Registry) -> _Completion:
        """The completion on a group of meshes.

        Raises:
            StrategyError: if such a mesh cannot be used at all.
        """
        alone = resolve(Strategy(steps_of((), group.first)), cluster, registry).chosen
        names = {group.first.method.name} if group.first is not None else set()
        return cls(
            tuple(item for item in alone if item.method.name in names),
            tuple(item for item in alone if item.method.name not in names),
        )

    def complete(self, methods: tuple[Chosen, ...]) -> tuple[Chosen, ...]:
        """The methods of a strategy, in order.

        Raises:
            StrategyError: if two of them cannot be combined.
        """
        roles = {role for item in methods for role in item.method.roles(item.config)}
        missing = tuple(item for item in self.added if not roles.intersection(item.method.roles(item.config)))
        for item in methods:
            for other in (*self.mesh, *missing):
                if (reason := clash(item, other)) is not None:
                    names = f"{item.method.name} and {other.method.name}"
                    raise StrategyError(f"{names} cannot be combined: {reason}")
        return ordered((*self.mesh, *missing, *methods))


def _build_combinations(kinds: Sequence[tuple[Chosen | None, ...]]) -> tuple[list[tuple[Chosen, ...]], int]:
    combinations: list[tuple[Chosen, ...]] = [()]
    left_out = 0
    for alternatives in kinds:
        extensions = [
            combination if item is None else (*combination, item)
            for combination in combinations
            for item in alternatives
            if item is None or all(clash(item, other) is None for other in combination)
        ]
        extensions.sort(key=len)  # the longest are beyond the limit
        left_out += max(0, len(extensions) - MAX_COMBINATIONS)
        combinations = extensions[:MAX_COMBINATIONS]
    return combinations, left_out


def mesh_groups(meshes: Iterable[Chosen | None]) -> list[MeshGroup]:
    """The meshes by kind, in the order in which they were offered."""
    groups: dict[object, dict[Shape, Chosen | None]] = {}
    for item in meshes:
        plan = Plan() if item is None else item.method.plan(Plan(), item.config)
        data, zero = plan.size("data"), plan.size("zero")
        model = tuple(plan.size(name) for name in MODEL_AXES)
        others = tuple(name for name, size in plan.axes if size > 1 and name not in ("data", "zero"))
        # Of a kind: the same axes above 1, hybrid sharding in all or none, and data ranks in all or none.
        key = (others, plan.rank_order, zero > 1, data > 1 and zero > 1, data * zero > 1 or not others)
        groups.setdefault(key, {}).setdefault((data, zero, *model), item)
    return [MeshGroup(meshes) for meshes in groups.values()]


def steps_of(methods: Iterable[Chosen], *more: Chosen | None) -> list[tuple[str, object]]:
    """The entries of a strategy of these methods."""
    items = [item for item in (*more, *methods) if item is not None]
    return [(item.method.name, item.config.as_json() or None) for item in items]


def _plan_kind(plan: Plan) -> Plan:
    # Sizes of axes and numbers of micro-batches are columns of the table.
    axes = tuple((name, 0) for name, _ in plan.axes)
    return replace(plan, axes=tuple(sorted(axes)), num_micro_batches=1)
