"""Chosen methods: methods with their configs, in order, and names of classes fitted to a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from atorch_ns.method.method import Method, MethodConfig, selector_keys
from atorch_ns.method.phase import ORDER
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan


@dataclass(frozen=True)
class Note:
    """A decision made for the user: a method added, left out or expanded, or a size or a name fitted.

    Attributes:
        kind: the kind of decision.
        method: the method concerned.
        text: the decision and its reason, as a sentence.
    """

    kind: Literal["added", "left out", "fitted", "expanded"]
    method: str
    text: str


@dataclass(frozen=True)
class Chosen:
    """A method with its validated config."""

    method: Method[Any]
    config: MethodConfig


def ordered(methods: Iterable[Chosen]) -> tuple[Chosen, ...]:
    """Methods in the order of application."""
    return tuple(sorted(methods, key=lambda item: ORDER.index(item.method.phase)))


def fold_plan(methods: Iterable[Chosen]) -> Plan:
    """The joint plan of the methods, each adding its part in order."""
    plan = Plan()
    for item in methods:
        plan = item.method.plan(plan, item.config)
    return plan


_SCRIPT = "__main__."  # prefix of classes in the running script


def named_as_here(methods: Iterable[Chosen], profile: Profile) -> tuple[list[Chosen], list[Note]]:
    """Replaces class names so that they identify the model's classes here and elsewhere.

    A class is called ``__main__.Block`` in the script that defines it and ``train.Block`` where the script is
    imported. A full name that matches nothing is therefore taken as its qualified name, ``Block``, if exactly
    one class of the model has it. A class of ``__main__`` is called by its qualified name from the beginning,
    unless another class has it too.
    """
    results: list[Chosen] = []
    notes: list[Note] = []
    for item in methods:
        name = item.method.name
        changes: dict[str, tuple[str, ...]] = {}
        for key in selector_keys(type(item.config)):
            old = getattr(item.config, key) or ()
            new = tuple(_name_here(selector, profile) for selector in old)
            if new == old:
                continue
            changes[key] = new
            notes += [
                Note("fitted", name, f"{name}.{key}: {_renaming_text(before, after, profile)}")
                for before, after in zip(old, new, strict=True)
                if before != after and profile.unmatched([before])
            ]
        results.append(replace(item, config=item.config.model_copy(update=changes)) if changes else item)
    return results, notes


def _name_here(selector: str, profile: Profile) -> str:
    if not selector.startswith(_SCRIPT) and not profile.unmatched([selector]):
        return selector
    name, classes = profile.namesakes(selector)
    return name if len(classes) == 1 and name not in profile.module_classes else selector


def _renaming_text(before: str, after: str, profile: Profile) -> str:
    (full,) = profile.namesakes(before)[1]
    return f"{before} is not in this model; taken as {after}, the one class of that name here ({full})"
