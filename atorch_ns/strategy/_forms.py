"""The forms in which a user may write the entries of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atorch_ns.errors import Problem, StrategyError
from atorch_ns.strategy._step import Step
from atorch_ns.strategy._values import UnwritableValueError

ACCEPTED = "'name', ('name', config), {'name': ..., 'config': ...} or a Step"


def steps_from(entries: Iterable[Any]) -> tuple[Step, ...]:
    """Turns entries into steps.

    Raises:
        StrategyError: with one problem for every entry that cannot be read and every method named twice.
    """
    steps: list[Step] = []
    problems: list[Problem] = []
    for position, entry in enumerate(entries):
        try:
            step = _step_from(entry)
        except _EntryError as error:
            problems.append(Problem(message=f"entry {position} of the strategy {error}", method=error.method))
            continue
        if any(step.name == earlier.name for earlier in steps):
            problems.append(Problem(message="named twice; keep one of the two", method=step.name))
        steps.append(step)
    if problems:
        raise StrategyError(problems)
    return tuple(steps)


class _EntryError(ValueError):
    def __init__(self, message: str, method: str | None = None) -> None:
        self.method = method
        super().__init__(message)


def _step_from(entry: Any) -> Step:
    if isinstance(entry, Step):
        return entry
    if isinstance(entry, str):
        return _make(entry, None)
    if isinstance(entry, Mapping):
        unknown = set(entry) - {"name", "config"}
        if "name" not in entry or unknown:
            raise _EntryError(
                f"has the keys {sorted(map(str, entry))}; it needs 'name' and may have 'config'"
            )
        return _make(entry["name"], entry.get("config"))
    if isinstance(entry, Sequence):
        return _step_from_sequence(entry)
    raise _EntryError(f"is {_short(entry)}, a {type(entry).__name__}; write {ACCEPTED}")


def _step_from_sequence(entry: Sequence[Any]) -> Step:
    # ATorch writes its strategies as (name, config, tunable); whether a step may be tuned is asked of the
    # search, not of the strategy, so the third item is read and not kept.
    if len(entry) in (1, 2) or (len(entry) == 3 and isinstance(entry[2], bool)):
        return _make(entry[0], entry[1] if len(entry) > 1 else None)
    raise _EntryError(f"is {_short(entry)}, which has {len(entry)} items; write {ACCEPTED}")


def _make(name: Any, config: Any) -> Step:
    if not isinstance(name, str) or not name:
        raise _EntryError(f"has {_short(name)} where a method's name should stand; write {ACCEPTED}")
    try:
        return Step(name, config)
    except UnwritableValueError as error:
        raise _EntryError(f"cannot be kept: {error}", method=name) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
