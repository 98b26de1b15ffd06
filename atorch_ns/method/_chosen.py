"""Methods with their configs, in order, and what was decided about them for the user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from atorch_ns.method._config import MethodConfig
from atorch_ns.method._method import Method
from atorch_ns.method._phase import ORDER
from atorch_ns.strategy import Plan

__all__ = ["Chosen", "Note", "fold_plan", "ordered"]


@dataclass(frozen=True)
class Note:
    """Something decided for the user: a method added, left out or replaced by what it stands for, a size or a name fitted.

    Attributes:
        kind: what was decided.
        method: the method concerned.
        text: what and why, as a sentence.
    """

    kind: Literal["added", "left out", "fitted", "expanded"]
    method: str
    text: str


@dataclass(frozen=True)
class Chosen:
    """A method with its validated config."""

    method: Method[Any]
    config: MethodConfig


def ordered(chosen: Iterable[Chosen]) -> tuple[Chosen, ...]:
    """Methods in the order of application."""
    return tuple(sorted(chosen, key=lambda item: ORDER.index(item.method.phase)))


def fold_plan(chosen: Iterable[Chosen]) -> Plan:
    """What methods decide together, each adding its part in order."""
    plan = Plan()
    for item in chosen:
        plan = item.method.plan(plan, item.config)
    return plan
