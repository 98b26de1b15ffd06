"""Wishes: which methods a user wants in the strategy, and which not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, InputError, StrategyError
from atorch_ns.method import Chosen, Method, MethodConfig, Phase, Registry, clash
from atorch_ns.profile import Profile
from atorch_ns.strategy import Step, Strategy

__all__ = ["Wish", "Wishes", "read_wishes"]


@dataclass(frozen=True)
class Wish:
    """One entry of ``included`` or ``excluded``.

    Attributes:
        written: as the user wrote it, for messages.
        methods: names of the methods that it means: one, or those of a group.
        config: the validated config; ``None`` if none was given.
    """

    written: str
    methods: tuple[str, ...]
    config: MethodConfig | None = None

    def means(self, method: str, config: MethodConfig) -> bool:
        """Whether it means this method so configured: the keys that were written are equal."""
        if method not in self.methods:
            return False
        wanted = self.config
        return wanted is None or all(
            getattr(config, key) == getattr(wanted, key) for key in wanted.model_fields_set
        )


@dataclass(frozen=True)
class Wishes:
    """What may and must stand in a strategy.

    Attributes:
        included: of each, one method must be there.
        excluded: none of these may be there.
    """

    included: tuple[Wish, ...] = ()
    excluded: tuple[Wish, ...] = ()
    _fixed: dict[str, MethodConfig] = field(default_factory=dict, repr=False)

    def fixed(self, method: str) -> MethodConfig | None:
        """The config that the user gave the method; ``None`` if it is free."""
        return self._fixed.get(method)

    def must(self, method: str) -> bool:
        """Whether this very method was asked for."""
        return any(wish.methods == (method,) for wish in self.included)

    def asks(self, method: str) -> bool:
        """Whether it was asked for, alone or in a group."""
        return any(method in wish.methods for wish in self.included)

    def forbids(self, method: str, config: MethodConfig) -> bool:
        """Whether the method may not be there with this config."""
        return any(wish.means(method, config) for wish in self.excluded)

    def unmet(self, chosen: Iterable[Chosen], *, to_come: Iterable[str] = ()) -> str | None:
        """What a strategy of these methods does against the wishes; ``None`` if nothing.

        Args:
            chosen: the methods of the strategy.
            to_come: names of methods that may still be added.
        """
        items = list(chosen)
        for item in items:
            if self.forbids(item.method.name, item.config):
                return f"{item.method.name} is excluded"
        for wish in self.included:
            present = {*to_come, *(item.method.name for item in items)}
            if not present & set(wish.methods):
                return f"{wish.written} is included and absent"
        return None

    def without_exclusions(self) -> Wishes:
        """The same with nothing excluded."""
        return Wishes(self.included, (), self._fixed)


def read_wishes(
    registry: Registry,
    *,
    included: Sequence[Any] | None,
    excluded: Sequence[Any] | None,
    cluster: Cluster,
    profile: Profile | None = None,
) -> Wishes:
    """Reads and checks both lists.

    Entries are names or aliases of methods, ``(name, config)`` pairs, or groups: roles (``"precision"``) and
    phases (``"recompute"``). An excluded pair forbids only configs in which the written keys are equal.

    Raises:
        InputError: with everything that is wrong with them: unknown names, configs that are refused,
            contradictions, and what is impossible here.
    """
    problems: list[str] = []
    wanted = _entries("included", included, registry, problems)
    banned = _entries("excluded", excluded, registry, problems)
    if not problems:
        problems += _contradictions(wanted, banned, registry)
        problems += _impossible(wanted, registry, cluster, profile)
    if problems:
        lines = problems if len(problems) == 1 else ["", *(f"  {n}. {p}" for n, p in enumerate(problems, 1))]
        raise InputError("the strategy cannot be searched for as asked: " + "\n".join(lines))
    fixed = {wish.methods[0]: wish.config for wish in wanted if wish.config is not None}
    return Wishes(tuple(wanted), tuple(banned), fixed)


def _entries(
    argument: str, entries: Sequence[Any] | None, registry: Registry, problems: list[str]
) -> list[Wish]:
    if isinstance(entries, str):
        problems.append(f"{argument} is a list of method names; write [{entries!r}].")
        return []
    found: list[Wish] = []
    for entry in entries or ():
        try:
            (step,) = Strategy([entry]).steps
        except StrategyError as error:
            problems.append(f"{argument}: {error}")
            continue
        wish = _wish(step, registry)
        if isinstance(wish, str):
            problems.append(f"{argument}: {wish}")
        else:
            found.append(wish)
    return found


def _wish(step: Step, registry: Registry) -> Wish | str:
    if step.name in registry:
        method = registry.get(step.name)
        if step.config is None:
            return Wish(step.name, (method.name,))
        try:
            return Wish(str(step), (method.name,), method.Config.model_validate(step.config))
        except ValidationError as error:
            return f"{step.name}: " + "; ".join(_issue(issue) for issue in error.errors())
    groups = _groups(registry)
    if step.name not in groups:
        return _unknown(step.name, registry, groups)
    if step.config is not None:
        return f"{step.name} is a group of methods and takes no config; name one of {', '.join(groups[step.name])}."
    return Wish(step.name, groups[step.name])


def _groups(registry: Registry) -> dict[str, tuple[str, ...]]:
    """Method names by role and by phase."""
    groups: dict[str, list[str]] = {phase.name.lower(): [] for phase in Phase}
    for method in registry:
        for name in (method.phase.name.lower(), *method.provides):
            groups.setdefault(name, []).append(method.name)
    return {name: tuple(dict.fromkeys(methods)) for name, methods in groups.items() if methods}


def _unknown(name: str, registry: Registry, groups: dict[str, tuple[str, ...]]) -> str:
    known = [method.name for method in registry]
    aliases = [alias for method in registry for alias in method.aliases]
    near = difflib.get_close_matches(name.lower(), [*known, *aliases, *groups], n=1)
    hint = (
        f"Did you mean {near[0]!r}?" if near else f"Methods: {', '.join(known)}; groups: {', '.join(groups)}."
    )
    return f"unknown method or group {name!r}. {hint}"


def _issue(issue: Any) -> str:
    key = ".".join(str(part) for part in issue["loc"])
    message = issue["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _contradictions(wanted: list[Wish], banned: list[Wish], registry: Registry) -> list[str]:
    problems = []
    for wish in wanted:
        left = [name for name in wish.methods if not _banned(name, wish.config, banned)]
        if not left:
            problems.append(f"{wish.written} is both included and excluded.")
    items = [
        (wish, Chosen(registry.get(wish.methods[0]), wish.config or registry.get(wish.methods[0]).Config()))
        for wish in wanted
        if len(wish.methods) == 1
    ]
    for position, (first, one) in enumerate(items):
        for second, other in items[position + 1 :]:
            if one.method is other.method:
                problems.append(
                    f"{first.written} and {second.written} are the same method; keep one of them."
                )
            elif (reason := clash(one, other)) is not None:
                problems.append(f"{first.written} and {second.written} cannot stand together: {reason}")
    return problems


def _banned(method: str, config: MethodConfig | None, banned: list[Wish]) -> bool:
    if config is not None:
        return any(wish.means(method, config) for wish in banned)
    return any(method in wish.methods and wish.config is None for wish in banned)


def _impossible(
    wanted: list[Wish], registry: Registry, cluster: Cluster, profile: Profile | None
) -> list[str]:
    """What was asked for by its own name and cannot be done here."""
    problems = []
    for wish in wanted:
        if len(wish.methods) > 1:
            continue
        method = registry.get(wish.methods[0])
        reasons = [
            why_not(method, wish.config or config, cluster, profile)
            for config in _tries(method, cluster, profile)
        ]
        if all(reason is not None for reason in reasons):
            problems.append(f"{wish.written} is included and cannot be used here: {reasons[0]}")
    return problems


def _tries(method: Method[Any], cluster: Cluster, profile: Profile | None) -> list[MethodConfig]:
    options = list(method.options(profile, cluster)) if profile is not None else []
    return options or [method.Config()]


def why_not(
    method: Method[Any], config: MethodConfig, cluster: Cluster, profile: Profile | None
) -> str | None:
    """Why a method so configured does nothing or is refused on this cluster; ``None`` if it can be used."""
    if method.needs_process_group and not cluster.distributed:
        return "there is one process and no process group; start it with torchrun to use it."
    reason = method.unavailable(config, cluster)
    if reason is not None:
        return reason
    try:
        fitted = method.fit(config, cluster)
    except AtorchError as error:
        return str(error)
    problems = method.check(fitted, cluster, profile)
    return " ".join(str(problem) for problem in problems) or None
