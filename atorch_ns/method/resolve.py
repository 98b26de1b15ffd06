"""Resolution of a strategy: its methods validated, expanded, fitted to a cluster, completed and ordered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from pydantic import ValidationError

from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, MethodNotFoundError, Problem, StrategyError
from atorch_ns.method.chosen import Chosen, Note, fold_plan, named_as_here, ordered
from atorch_ns.method.method import Expands, Expansion, Method, Need, fit_config
from atorch_ns.method.registry import Registry
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan, Requires, Strategy
from atorch_ns.text import clip_text, did_you_mean


def validate(strategy: Strategy, registry: Registry) -> tuple[list[Chosen], list[Problem]]:
    """The methods of a strategy with their configs, and all problems of names and configs."""
    choices: list[Chosen] = []
    problems: list[Problem] = []
    for step in strategy:
        if step.name not in registry:
            problems.append(registry.unknown(step.name))
            continue
        method = registry.get(step.name)
        if any(item.method is method for item in choices):
            problems.append(Problem(message=f"named twice, once as {step.name!r}", method=method.name))
        try:
            choices.append(Chosen(method, method.Config.model_validate(step.config)))
        except ValidationError as error:
            problems += [_config_problem(method, issue) for issue in error.errors()]
    return choices, problems


def expand(
    choices: list[Chosen], cluster: Cluster, registry: Registry
) -> tuple[list[Chosen], list[Note], list[Problem]]:
    """Replaces methods that stand for others, each with a note, and reports invalid expansions."""
    result: list[Chosen] = []
    notes: list[Note] = []
    problems: list[Problem] = []
    for item in choices:
        if not isinstance(item.method, Expands):
            result.append(item)
            continue
        others = [other for other in choices if other is not item]
        try:
            expansion = item.method.expand(item.config, fold_plan(ordered(others)), cluster)
        except StrategyError as error:
            problems += [replace(each, method=each.method or item.method.name) for each in error.problems]
            continue
        if expansion is None:
            result.append(item)
            continue
        methods, wrong = validate(Strategy(expansion.steps), registry)
        problems += wrong + _given_twice(item, methods, beside=[*others, *result])
        notes += _expansion_notes(item, methods, expansion)
        result += methods
    return result, notes, problems


def _given_twice(item: Chosen, choices: list[Chosen], *, beside: list[Chosen]) -> list[Problem]:
    names = {other.method.name for other in beside}
    text = f"given twice, as a method of its own and by {item.method.name}. Configure it in one of the two places"
    return [Problem(message=text, method=each.method.name) for each in choices if each.method.name in names]


def _expansion_notes(item: Chosen, choices: list[Chosen], expansion: Expansion) -> list[Note]:
    name = item.method.name
    methods = ", ".join(choice.method.name for choice in choices) or "methods that are added by default"
    return [
        Note("expanded", name, f"{name} stands for {methods}"),
        *(Note("left out", name, text) for text in expansion.notes),
    ]


def _config_problem(method: Method[Any], issue: Any) -> Problem:
    path = [str(part) for part in issue["loc"]]
    fields = list(method.Config.model_fields)
    key = ".".join(path) or None
    if issue["type"] == "extra_forbidden":
        return Problem(
            message=f"unknown key.{did_you_mean(path[0], fields)}",
            method=method.name,
            key=key,
            accepted=", ".join(fields) or "no keys",
        )
    message = issue["msg"].removeprefix("Value error, ")
    value = None if not path else clip_text(repr(issue["input"]), 80)
    return Problem(message=message, method=method.name, key=key, value=value)


@dataclass(frozen=True)
class Resolved:
    """A strategy that is ready to be applied.

    Attributes:
        chosen: methods and configs in order of application.
        plan: their decisions together.
        strategy: the strategy as saved, without defaults. It keeps methods omitted on this cluster,
            and replaces a method that stands for others by those methods.
        notes: decisions made for the user.
    """

    chosen: tuple[Chosen, ...]
    plan: Plan
    strategy: Strategy
    notes: tuple[Note, ...]


def resolve(
    strategy: Strategy, cluster: Cluster, registry: Registry, *, profile: Profile | None = None
) -> Resolved:
    """Validates, completes and orders a strategy for a cluster and, where given, a model.

    Pure: nothing is started, read or changed.

    Raises:
        MethodNotFoundError: if the only problems are unknown names.
        StrategyError: with every problem found.
    """
    chosen, problems = validate(strategy, registry)
    if problems:
        raise _make_error(problems)
    chosen, expansion_notes, problems = expand(chosen, cluster, registry)
    if problems:
        raise _make_error(problems)
    if profile is not None:
        chosen, name_notes = named_as_here(chosen, profile)
        expansion_notes += name_notes
    chosen, left_out, notes = _leave_out(chosen, cluster)
    chosen, size_notes, problems = _fit_configs(chosen, cluster)
    chosen, default_notes, unfilled = _add_defaults(chosen, cluster, registry)
    # Methods omitted here must fit too: a conflict must not wait for a machine with more processes.
    problems += unfilled + _find_clashes([*chosen, *left_out])
    if not problems:  # checks assume methods that can be combined
        for item in chosen:
            problems += item.method.check(item.config, cluster, profile)
    final = ordered(chosen)
    plan = fold_plan(final)
    if not problems:
        problems = [p for item in final for p in item.method.check_plan(item.config, plan, cluster)]
    if problems:
        raise _make_error(problems)
    result = _as_strategy(ordered([*chosen, *left_out]), cluster, strategy.provenance)
    return Resolved(final, plan, result, (*expansion_notes, *notes, *size_notes, *default_notes))


def _leave_out(choices: list[Chosen], cluster: Cluster) -> tuple[list[Chosen], list[Chosen], list[Note]]:
    usable: list[Chosen] = []
    left_out: list[Chosen] = []
    notes: list[Note] = []
    for item in choices:
        reason = item.method.unavailable(item.config, cluster)
        if item.method.needs_process_group and not cluster.distributed:
            reason = "there is one process and no process group; start it with torchrun to use it"
        if reason is None:
            usable.append(item)
            notices = item.method.notices(item.config, cluster)
            notes += [Note("left out", item.method.name, text) for text in notices]
        else:
            left_out.append(item)
            text = f"{item.method.name} is left out: {reason.rstrip('.')}. The strategy keeps it, for where it can be used"
            notes.append(Note("left out", item.method.name, text))
    return usable, left_out, notes


def _fit_configs(choices: list[Chosen], cluster: Cluster) -> tuple[list[Chosen], list[Note], list[Problem]]:
    results: list[Chosen] = []
    notes: list[Note] = []
    problems: list[Problem] = []
    for item in choices:
        try:
            config = fit_config(item.method, item.config, cluster)
        except AtorchError as error:
            problems.append(Problem(message=str(error), method=item.method.name))
            continue
        if config != item.config and item.config.as_json():
            text = f"{item.method.name}: {item.config.as_json()} became {config.as_json()}"
            notes.append(Note("fitted", item.method.name, f"{text} to fit {cluster.world_size} processes"))
        results.append(replace(item, config=config))
    return results, notes, problems


def _add_defaults(
    choices: list[Chosen], cluster: Cluster, registry: Registry
) -> tuple[list[Chosen], list[Note], list[Problem]]:
    complete = list(choices)
    notes: list[Note] = []
    problems: list[Problem] = []
    roles: set[str] = set()  # each role once: a default may need others
    while True:
        need = next((need for need in _unfilled_needs(complete, cluster) if need.role not in roles), None)
        if need is None:
            return complete, notes, problems
        roles.add(need.role)
        method = registry.default_for(need.role)
        if method is None:
            providers = [other.name for other in registry if need.role in other.provides]
            hint = f"Add {' or '.join(providers)}" if providers else "No installed method does that"
            problems.append(Problem(message=f"nothing fills the role {need.role!r}: {need.reason}. {hint}."))
            continue
        config = fit_config(method, method.Config(), cluster)
        complete.append(Chosen(method, config))
        notes.append(Note("added", method.name, f"{method.name} is added because {need.reason}"))


def _unfilled_needs(choices: list[Chosen], cluster: Cluster) -> list[Need]:
    filled_roles = {role for item in choices for role in item.method.roles(item.config)}
    needs = [need for item in choices for need in item.method.needs(item.config, cluster)]
    if cluster.distributed:
        needs.insert(0, Need("mesh", f"there are {cluster.world_size} processes"))
    return [need for need in needs if need.role not in filled_roles]


def _find_clashes(choices: list[Chosen]) -> list[Problem]:
    problems: list[Problem] = []
    for first, second in combinations(choices, 2):
        if (reason := clash(first, second)) is not None:
            names = f"{first.method.name} and {second.method.name}"
            problems.append(Problem(message=f"{names} cannot be combined: {reason}"))
    return problems


def clash(first: Chosen, second: Chosen) -> str | None:
    """Reason for which two methods cannot be combined, or ``None`` if they can."""
    shared = sorted(set(first.method.roles(first.config)) & set(second.method.roles(second.config)))
    for mine, theirs in ((first, second), (second, first)):  # either may declare it
        for conflict in mine.method.conflicts:
            if conflict.other == theirs.method.name and conflict.holds(mine.config, theirs.config):
                return conflict.reason
    if shared:
        return f"both fill the role {shared[0]!r}. Keep one of them."
    return None


def _as_strategy(items: tuple[Chosen, ...], cluster: Cluster, provenance: Mapping[str, Any]) -> Strategy:
    steps = [(item.method.name, item.config.as_json() or None) for item in items]
    version = ".".join(cluster.torch.split(".")[:2]) or None  # major and minor alone
    requires = Requires(world_size=cluster.world_size, device=cluster.device_type, torch=version)
    return Strategy(steps, requires=requires, provenance=provenance)


def _make_error(problems: list[Problem]) -> StrategyError:
    if all(problem.message.startswith("unknown method") for problem in problems):
        return MethodNotFoundError(problems)
    return StrategyError(problems)


class Pairing(NamedTuple):
    """Two methods, and the reason for which they cannot be combined, or ``None`` if they can."""

    first: str
    second: str
    reason: str | None


class Composition(NamedTuple):
    """All methods, variants that compose differently included, and every pair of two different methods."""

    names: tuple[str, ...]
    pairings: tuple[Pairing, ...]


def composition(registry: Registry) -> Composition:
    """Every pair of methods of a registry, with default configs and with each declared variant."""
    entries: list[tuple[str, Chosen]] = []
    for method in registry:
        entries.append((method.name, Chosen(method, method.Config())))
        for label, config in method.variants.items():
            entries.append((f"{method.name} ({label})", Chosen(method, method.Config.model_validate(config))))
    pairings = [
        Pairing(first, second, clash(choice, other))
        for (first, choice), (second, other) in combinations(entries, 2)
        if choice.method is not other.method
    ]
    return Composition(tuple(name for name, _ in entries), tuple(pairings))
