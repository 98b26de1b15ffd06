"""From what a user wrote to methods with validated configs, what methods stand for written out."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem, StrategyError
from atorch_ns.method._chosen import Chosen, Note, fold_plan, ordered
from atorch_ns.method._method import Expansion, Method
from atorch_ns.method._registry import Registry
from atorch_ns.strategy import Strategy

__all__ = ["expand", "validate"]


def validate(strategy: Strategy, registry: Registry) -> tuple[list[Chosen], list[Problem]]:
    """The methods of a strategy with their configs, and everything that is wrong with names and configs."""
    chosen: list[Chosen] = []
    problems: list[Problem] = []
    for step in strategy:
        if step.name not in registry:
            problems.append(registry.unknown(step.name))
            continue
        method = registry.get(step.name)
        if any(item.method is method for item in chosen):
            problems.append(Problem(message=f"named twice, once as {step.name!r}", method=method.name))
        try:
            chosen.append(Chosen(method, method.Config.model_validate(step.config)))
        except ValidationError as error:
            problems += [_config_problem(method, issue) for issue in error.errors()]
    return chosen, problems


def expand(
    chosen: list[Chosen], cluster: Cluster, registry: Registry
) -> tuple[list[Chosen], list[Note], list[Problem]]:
    """Puts what methods stand for in their places, says so, and finds what cannot stand there."""
    result: list[Chosen] = []
    notes: list[Note] = []
    problems: list[Problem] = []
    for item in chosen:
        if type(item.method).expand is Method.expand:
            result.append(item)
            continue
        others = [other for other in chosen if other is not item]
        try:
            expansion = item.method.expand(item.config, fold_plan(ordered(others)), cluster)
        except StrategyError as error:
            problems += [replace(one, method=one.method or item.method.name) for one in error.problems]
            continue
        if expansion is None:
            result.append(item)
            continue
        own, wrong = validate(Strategy(expansion.steps), registry)
        problems += wrong + _given_twice(item, own, beside=[*others, *result])
        notes += _notes(item, own, expansion)
        result += own
    return result, notes, problems


def _given_twice(item: Chosen, own: list[Chosen], *, beside: list[Chosen]) -> list[Problem]:
    taken = {other.method.name for other in beside}
    text = f"given twice, as a method of its own and by {item.method.name}. Configure it in one of the two places"
    return [Problem(message=text, method=one.method.name) for one in own if one.method.name in taken]


def _notes(item: Chosen, own: list[Chosen], expansion: Expansion) -> list[Note]:
    name = item.method.name
    methods = ", ".join(one.method.name for one in own) or "methods that are added by default"
    return [
        Note("expanded", name, f"{name} stands for {methods}"),
        *(Note("left out", name, text) for text in expansion.notes),
    ]


def _config_problem(method: Method[Any], issue: Any) -> Problem:
    path = [str(part) for part in issue["loc"]]
    fields = list(method.Config.model_fields)
    key = ".".join(path) or None
    if issue["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[0], fields, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return Problem(
            message=f"unknown key.{hint}",
            method=method.name,
            key=key,
            accepted=", ".join(fields) or "no keys",
        )
    message = issue["msg"].removeprefix("Value error, ")
    shown = None if not path else _short(issue["input"])
    return Problem(message=message, method=method.name, key=key, value=shown)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
