"""Choices: what each method may do in a strategy of the space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from atorch_ns.cluster import Cluster
from atorch_ns.estimate import AxisUse
from atorch_ns.method import Chosen, Method, MethodConfig, Registry
from atorch_ns.profile import Profile
from atorch_ns.search._wishes import Wishes, why_not
from atorch_ns.strategy import MODEL_AXES, Plan, Strategy

__all__ = ["Choices", "axes_of", "find_choices"]

EXCLUDED = "it is excluded."

_USE = frozenset(AxisUse._fields)


@dataclass(frozen=True)
class Choices:
    """What a strategy may be put together from.

    Attributes:
        kinds: for each method that changes what is done, its alternatives; ``None`` is to do without.
        meshes: alternatives of the method that arranges the ranks; ``(None,)`` where nothing is arranged.
        passes: alternatives by number of micro-batches, ``None`` for one without a method.
        uses: for each axis that divides the model, how it may be used; ``None`` as the method that is added for
            it uses it.
        refused: methods that are left out, and why.
    """

    kinds: tuple[tuple[Chosen | None, ...], ...]
    meshes: tuple[Chosen | None, ...]
    passes: dict[int, Chosen | None]
    refused: dict[str, str]
    uses: dict[str, tuple[Chosen | None, ...]] = field(default_factory=dict)


def find_choices(
    registry: Registry, profile: Profile, cluster: Cluster, wishes: Wishes, base: Strategy | None
) -> Choices:
    """The alternatives of every method.

    A method is asked for its ``options``; a config given by the user, or else by the base strategy, stands
    for them or beside them. Which method arranges the ranks and which splits the batch is read off what they
    change in a plan.

    Args:
        registry: the methods there are.
        profile: of the model.
        cluster: to run on.
        wishes: what must and may not be there.
        base: a strategy whose methods are kept, all of them and no other; ``None`` for any.
    """
    kinds: list[tuple[Chosen | None, ...]] = []
    meshes: tuple[Chosen | None, ...] = (None,)
    passes: dict[int, Chosen | None] = {1: None}
    refused: dict[str, str] = {}
    uses: dict[str, tuple[Chosen | None, ...]] = {}
    for method in registry:
        if base is not None and not _named(method, base):
            continue
        configs, reason = _configs(method, profile, cluster, wishes, base)
        if reason is not None and (not configs or reason != EXCLUDED):
            refused[method.name] = reason
        if not configs:
            continue
        chosen = tuple(Chosen(method, config) for config in configs)
        must = wishes.must(method.name) or base is not None
        changed = set().union(*(_changed(item) for item in chosen))
        if changed and changed <= {"axes", "rank_order"}:
            meshes = chosen
        elif changed <= _USE and not must and len(axes := _axes(chosen)) == 1:
            uses[axes.pop()] = (None, *chosen)
        elif changed == {"num_micro_batches"}:
            passes = {item.method.plan(Plan(), item.config).num_micro_batches: item for item in chosen}
            if not must:
                passes = {1: None, **passes}
        else:
            kinds.append(chosen if must else (None, *chosen))
    return Choices(tuple(kinds), meshes, passes, refused, uses)


def _axes(chosen: Sequence[Chosen]) -> set[str]:
    """The axes that divide the model and that a method is added for."""
    return {axis for item in chosen if item.method.default_for is not None for axis in axes_of(item)}


def _named(method: Method[Any], strategy: Strategy) -> bool:
    return any(name in strategy for name in (method.name, *method.aliases))


def _configs(
    method: Method[Any], profile: Profile, cluster: Cluster, wishes: Wishes, base: Strategy | None
) -> tuple[list[MethodConfig], str | None]:
    """The configs to choose from, and why there are fewer than the method has, if it was refused."""
    fixed = wishes.fixed(method.name)
    if fixed is not None:
        offered: Sequence[MethodConfig] = [fixed]
    else:
        offered = [*_base_configs(method, base), *method.options(profile, cluster)]
        if not offered and wishes.must(method.name):
            offered = [method.Config()]
    kept: list[MethodConfig] = []
    reason = None
    for config in offered:
        if wishes.forbids(method.name, config):
            reason = EXCLUDED
            continue
        if _is_default(method, config) and fixed is None and not wishes.must(method.name) and base is None:
            continue  # added by itself wherever it is needed
        problem = why_not(method, config, cluster, profile)
        if problem is not None:
            reason = problem
        elif (fitted := method.fit(config, cluster)) not in kept:
            kept.append(fitted)
    return kept, reason


def _base_configs(method: Method[Any], base: Strategy | None) -> list[MethodConfig]:
    if base is None:
        return []
    return [
        method.Config.model_validate(base[name]) for name in (method.name, *method.aliases) if name in base
    ]


def _is_default(method: Method[Any], config: MethodConfig) -> bool:
    """Whether ``resolve`` adds just this where its role is needed."""
    return method.default_for is not None and config == method.Config()


def axes_of(item: Chosen) -> tuple[str, ...]:
    """The axes that a method divides the model along; empty for most."""
    roles = (role for role in item.method.roles(item.config) if role.startswith("axis:"))
    axes = (role.removeprefix("axis:") for role in roles)
    return tuple(axis for axis in axes if axis in MODEL_AXES)


def _changed(item: Chosen) -> set[str]:
    """The fields of a plan that a method changes."""
    before = Plan()
    after = item.method.plan(before, item.config)
    return {field.name for field in fields(Plan) if getattr(after, field.name) != getattr(before, field.name)}
