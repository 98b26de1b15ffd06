"""From the strategy a user wrote to the methods that will be applied, in order, with everything filled in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, MethodNotFoundError, Problem, StrategyError
from atorch_ns.method._chosen import Chosen, Note, fold_plan, ordered
from atorch_ns.method._method import Need
from atorch_ns.method._namesakes import named_as_here
from atorch_ns.method._registry import Registry
from atorch_ns.method._validate import expand, validate
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan, Requires, Strategy

__all__ = ["Resolved", "clash", "resolve"]


@dataclass(frozen=True)
class Resolved:
    """A strategy that is ready to be applied.

    Attributes:
        chosen: methods and configs in order of application.
        plan: what they decide together.
        strategy: as it is saved, defaults left out. It keeps what is left out here, for where it can be used, and
            has what a method stands for in that method's place.
        notes: what was decided for the user.
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
        raise _error(problems)
    chosen, expanded, problems = expand(chosen, cluster, registry)
    if problems:
        raise _error(problems)
    if profile is not None:
        chosen, renamed = named_as_here(chosen, profile)
        expanded += renamed
    chosen, left_out, notes = _leave_out(chosen, cluster)
    chosen, fitted, problems = _fit(chosen, cluster)
    chosen, added, unfilled = _complete(chosen, cluster, registry)
    # What is left out here must fit as well: a conflict must not wait for the machine with more processes.
    problems += unfilled + _clashes([*chosen, *left_out])
    if not problems:
        for item in chosen:
            problems += item.method.check(item.config, cluster, profile)
    if problems:
        raise _error(problems)
    final = ordered(chosen)
    saved = _as_strategy(ordered([*chosen, *left_out]), cluster)
    return Resolved(final, fold_plan(final), saved, (*expanded, *notes, *fitted, *added))


def _leave_out(chosen: list[Chosen], cluster: Cluster) -> tuple[list[Chosen], list[Chosen], list[Note]]:
    kept: list[Chosen] = []
    left_out: list[Chosen] = []
    notes: list[Note] = []
    for item in chosen:
        reason = item.method.unavailable(item.config, cluster)
        if item.method.needs_process_group and not cluster.distributed:
            reason = "there is one process and no process group; start it with torchrun to use it"
        if reason is None:
            kept.append(item)
            notes += [
                Note("left out", item.method.name, text) for text in item.method.notices(item.config, cluster)
            ]
        else:
            left_out.append(item)
            text = f"{item.method.name} is left out: {reason.rstrip('.')}. The strategy keeps it, for where it can be used"
            notes.append(Note("left out", item.method.name, text))
    return kept, left_out, notes


def _fit(chosen: list[Chosen], cluster: Cluster) -> tuple[list[Chosen], list[Note], list[Problem]]:
    fitted: list[Chosen] = []
    notes: list[Note] = []
    problems: list[Problem] = []
    for item in chosen:
        try:
            config = item.method.fit(item.config, cluster)
        except AtorchError as error:
            problems.append(Problem(message=str(error), method=item.method.name))
            continue
        if config != item.config and item.config.as_json():
            text = f"{item.method.name}: {item.config.as_json()} became {config.as_json()}"
            notes.append(Note("fitted", item.method.name, f"{text} to fit {cluster.world_size} processes"))
        fitted.append(replace(item, config=config))
    return fitted, notes, problems


def _complete(
    chosen: list[Chosen], cluster: Cluster, registry: Registry
) -> tuple[list[Chosen], list[Note], list[Problem]]:
    """Adds the default method for every role that is needed and not filled."""
    complete = list(chosen)
    notes: list[Note] = []
    problems: list[Problem] = []
    tried: set[str] = set()
    while True:
        need = next((need for need in _unfilled(complete, cluster) if need.role not in tried), None)
        if need is None:
            return complete, notes, problems
        tried.add(need.role)
        method = registry.default_for(need.role)
        if method is None:
            providers = [other.name for other in registry if need.role in other.provides]
            hint = f"Add {' or '.join(providers)}" if providers else "No installed method does that"
            problems.append(Problem(message=f"nothing fills the role {need.role!r}: {need.reason}. {hint}."))
            continue
        config = method.fit(method.Config(), cluster)
        complete.append(Chosen(method, config))
        notes.append(Note("added", method.name, f"{method.name} is added because {need.reason}"))


def _unfilled(chosen: list[Chosen], cluster: Cluster) -> list[Need]:
    filled = {role for item in chosen for role in item.method.roles(item.config)}
    needs = [need for item in chosen for need in item.method.needs(item.config, cluster)]
    if cluster.distributed:
        needs.insert(0, Need("mesh", f"there are {cluster.world_size} processes"))
    return [need for need in needs if need.role not in filled]


def _clashes(chosen: list[Chosen]) -> list[Problem]:
    problems: list[Problem] = []
    for position, first in enumerate(chosen):
        for second in chosen[position + 1 :]:
            reason = clash(first, second)
            if reason is not None:
                names = f"{first.method.name} and {second.method.name}"
                problems.append(Problem(message=f"{names} cannot stand together: {reason}"))
    return problems


def clash(first: Chosen, second: Chosen) -> str | None:
    """Why two methods cannot stand together; ``None`` if they can."""
    shared = sorted(set(first.method.roles(first.config)) & set(second.method.roles(second.config)))
    for mine, theirs in ((first, second), (second, first)):
        for conflict in mine.method.conflicts:
            if conflict.other == theirs.method.name and conflict.holds(mine.config, theirs.config):
                return conflict.reason
    if shared:
        return f"both fill the role {shared[0]!r}. Keep one of them."
    return None


def _as_strategy(ordered: tuple[Chosen, ...], cluster: Cluster) -> Strategy:
    steps = [(item.method.name, item.config.as_json() or None) for item in ordered]
    version = ".".join(cluster.torch.split(".")[:2]) or None
    requires = Requires(world_size=cluster.world_size, device=cluster.device_type, torch=version)
    return Strategy(steps, requires=requires)


def _error(problems: list[Problem]) -> StrategyError:
    if all(problem.message.startswith("unknown method") for problem in problems):
        return MethodNotFoundError(problems)
    return StrategyError(problems)
