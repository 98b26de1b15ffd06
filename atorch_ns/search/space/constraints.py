"""Constraints: the methods that a strategy must and must not contain, as the user gave them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, InputError, StrategyError
from atorch_ns.method import Chosen, Method, MethodConfig, Phase, Registry, clash
from atorch_ns.method.method import fit_config
from atorch_ns.profile import Profile
from atorch_ns.strategy import Step, Strategy
from atorch_ns.text import did_you_mean


@dataclass(frozen=True)
class MethodConstraint:
    """One entry of ``included`` or ``excluded``.

    Attributes:
        written: the entry as the user wrote it, for messages.
        methods: names of its methods: one, or those of a group.
        config: the validated config; ``None`` if none was given.
    """

    written: str
    methods: tuple[str, ...]
    config: MethodConfig | None = None

    def matches(self, method: str, config: MethodConfig) -> bool:
        """Returns whether it covers this method with this config. The written keys must be equal."""
        if method not in self.methods:
            return False
        pattern = self.config
        return pattern is None or all(
            getattr(config, key) == getattr(pattern, key) for key in pattern.model_fields_set
        )


@dataclass(frozen=True)
class Constraints:
    """All constraints of a search.

    Attributes:
        included: for each, a strategy must contain at least one of its methods.
        excluded: for each, a strategy may contain none of its methods.
    """

    included: tuple[MethodConstraint, ...] = ()
    excluded: tuple[MethodConstraint, ...] = ()
    _fixed: dict[str, MethodConfig] = field(default_factory=dict, repr=False)

    def fixed(self, method: str) -> MethodConfig | None:
        """Returns the config that the user gave the method; ``None`` if it is free."""
        return self._fixed.get(method)

    def requires(self, method: str) -> bool:
        """Returns whether this method itself is required."""
        return any(constraint.methods == (method,) for constraint in self.included)

    def forbids(self, method: str, config: MethodConfig) -> bool:
        """Returns whether the method with this config is excluded."""
        return any(constraint.matches(method, config) for constraint in self.excluded)

    def violation(self, choices: Iterable[Chosen], *, to_come: Iterable[str] = ()) -> str | None:
        """The constraint that a strategy of these methods violates, as a clause; ``None`` if none.

        Args:
            to_come: names of methods that may still be added.
        """
        items = list(choices)
        for item in items:
            if self.forbids(item.method.name, item.config):
                return f"{item.method.name} is excluded"
        for constraint in self.included:
            present = {*to_come, *(item.method.name for item in items)}
            if not present & set(constraint.methods):
                return f"{constraint.written} is included and absent"
        return None

    def without_exclusions(self) -> Constraints:
        """Returns the same constraints with nothing excluded."""
        return Constraints(self.included, (), self._fixed)


def read_constraints(
    registry: Registry,
    *,
    included: Sequence[Any] | None,
    excluded: Sequence[Any] | None,
    cluster: Cluster,
    profile: Profile | None = None,
) -> Constraints:
    """Reads and checks both lists, on every rank before the profile and then with it for the search.

    Entries are names or aliases of methods, ``(name, config)`` pairs, or groups: roles (``"precision"``) and
    phases (``"recompute"``). An excluded pair forbids only configs in which the written keys are equal.

    Raises:
        InputError: with all problems: unknown names, invalid configs, contradictions, and methods that cannot
            be used here.
    """
    problems: list[str] = []
    inclusions = _read_entries("included", included, registry, problems)
    exclusions = _read_entries("excluded", excluded, registry, problems)
    if not problems:  # entries that could not be read are missing from both lists
        problems += _find_contradictions(inclusions, exclusions, registry)
        problems += _find_unusable_methods(inclusions, registry, cluster, profile)
    if problems:
        lines = problems if len(problems) == 1 else ["", *(f"  {n}. {p}" for n, p in enumerate(problems, 1))]
        raise InputError("the strategy cannot be searched for as asked: " + "\n".join(lines))
    configs = {each.methods[0]: each.config for each in inclusions if each.config is not None}
    return Constraints(tuple(inclusions), tuple(exclusions), configs)


def _read_entries(
    argument: str, entries: Sequence[Any] | None, registry: Registry, problems: list[str]
) -> list[MethodConstraint]:
    if isinstance(entries, str):  # a string is a sequence of letters, too
        problems.append(f"{argument} is a list of method names; write [{entries!r}].")
        return []
    constraints: list[MethodConstraint] = []
    for entry in entries or ():
        try:
            (step,) = Strategy([entry]).steps
        except StrategyError as error:
            problems.append(f"{argument}: {error}")
            continue
        constraint = _read_constraint(step, registry)
        if isinstance(constraint, str):
            problems.append(f"{argument}: {constraint}")
        else:
            constraints.append(constraint)
    return constraints


def _read_constraint(step: Step, registry: Registry) -> MethodConstraint | str:
    if step.name in registry:
        method = registry.get(step.name)
        if step.config is None:
            return MethodConstraint(step.name, (method.name,))
        try:
            return MethodConstraint(str(step), (method.name,), method.Config.model_validate(step.config))
        except ValidationError as error:
            return f"{step.name}: " + "; ".join(_issue_text(issue) for issue in error.errors())
    groups = _method_groups(registry)
    if step.name not in groups:
        return _unknown_name_text(step.name, registry, groups)
    if step.config is not None:
        names = ", ".join(groups[step.name])
        return f"{step.name} is a group of methods and takes no config; name one of {names}."
    return MethodConstraint(step.name, groups[step.name])


def _method_groups(registry: Registry) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {phase.name.lower(): [] for phase in Phase}
    for method in registry:
        for name in (method.phase.name.lower(), *method.provides):  # by phase, and by role
            groups.setdefault(name, []).append(method.name)
    return {name: tuple(dict.fromkeys(methods)) for name, methods in groups.items() if methods}


def _unknown_name_text(name: str, registry: Registry, groups: dict[str, tuple[str, ...]]) -> str:
    methods = [method.name for method in registry]
    aliases = [alias for method in registry for alias in method.aliases]
    names = f"Methods: {', '.join(methods)}; groups: {', '.join(groups)}."
    hint = did_you_mean(name, [*methods, *aliases, *groups], otherwise=names)
    return f"unknown method or group {name!r}.{hint}"


def _issue_text(issue: Any) -> str:
    key = ".".join(str(part) for part in issue["loc"])
    message = issue["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _find_contradictions(
    inclusions: list[MethodConstraint], exclusions: list[MethodConstraint], registry: Registry
) -> list[str]:
    problems = [
        f"{constraint.written} is both included and excluded."
        for constraint in inclusions
        if all(_is_banned(name, constraint.config, exclusions) for name in constraint.methods)
    ]
    items = []
    for constraint in inclusions:
        if len(constraint.methods) == 1:  # in a group, another method may still agree
            method = registry.get(constraint.methods[0])
            items.append((constraint.written, Chosen(method, constraint.config or method.Config())))
    for (first, choice), (second, other) in itertools.combinations(items, 2):
        if choice.method is other.method:
            problems.append(f"{first} and {second} are the same method; keep one of them.")
        elif (reason := clash(choice, other)) is not None:
            problems.append(f"{first} and {second} cannot be combined: {reason}")
    return problems


def _is_banned(method: str, config: MethodConfig | None, exclusions: list[MethodConstraint]) -> bool:
    if config is not None:  # a ban need not name all of its keys
        return any(constraint.matches(method, config) for constraint in exclusions)
    return any(method in constraint.methods and constraint.config is None for constraint in exclusions)


def _find_unusable_methods(
    inclusions: list[MethodConstraint], registry: Registry, cluster: Cluster, profile: Profile | None
) -> list[str]:
    problems = []
    for constraint in inclusions:
        if len(constraint.methods) > 1:
            continue  # one usable method of a group is enough
        method = registry.get(constraint.methods[0])
        options = [] if profile is None else list(method.options(profile, cluster))
        reasons = [
            why_not(method, constraint.config or config, cluster, profile)
            for config in options or [method.Config()]
        ]
        if all(reason is not None for reason in reasons):
            problems.append(f"{constraint.written} is included and cannot be used here: {reasons[0]}")
    return problems


def why_not(
    method: Method[Any], config: MethodConfig, cluster: Cluster, profile: Profile | None
) -> str | None:
    """Returns why a method with this config is useless or refused on this cluster; ``None`` if usable."""
    if method.needs_process_group and not cluster.distributed:
        return "there is one process and no process group; start it with torchrun to use it."
    reason = method.unavailable(config, cluster)
    if reason is not None:
        return reason
    try:
        here = fit_config(method, config, cluster)
    except AtorchError as error:
        return str(error)
    problems = method.check(here, cluster, profile)
    return " ".join(str(problem) for problem in problems) or None
