"""Strategy diff: methods and settings in which two strategies differ."""

from __future__ import annotations

from typing import NamedTuple

from atorch_ns.strategy.strategy import Step, Strategy
from atorch_ns.strategy.values import JSON


class Difference(NamedTuple):
    """One config key whose value changed. ``None`` stands where a side does not set it."""

    method: str
    key: str
    before: JSON
    after: JSON


class StrategyDiff(NamedTuple):
    """The difference of two strategies. Empty (falsy by ``bool(diff.same)``) parts mean nothing changed."""

    added: tuple[Step, ...]
    removed: tuple[Step, ...]
    changed: tuple[Difference, ...]
    reordered: bool

    @property
    def same(self) -> bool:
        """Whether the two strategies have the same methods, configs and order."""
        return not (self.added or self.removed or self.changed or self.reordered)

    def __str__(self) -> str:
        if self.same:
            return "no difference"
        lines = [f"- {step}" for step in self.removed]
        lines += [f"+ {step}" for step in self.added]
        lines += [f"~ {item.method}.{item.key}: {item.before!r} → {item.after!r}" for item in self.changed]
        if self.reordered:
            lines.append("~ the common methods stand in another order")
        return "\n".join(lines)


def diff(before: Strategy, after: Strategy) -> StrategyDiff:
    """Compares two strategies method by method and key by key."""
    old = {step.name: step for step in before}
    new = {step.name: step for step in after}
    common = [name for name in before.names if name in new]

    return StrategyDiff(
        added=tuple(step for step in after if step.name not in old),
        removed=tuple(step for step in before if step.name not in new),
        changed=tuple(item for name in common for item in _step_differences(old[name], new[name])),
        reordered=common != [name for name in after.names if name in old],
    )


def _step_differences(old: Step, new: Step) -> list[Difference]:
    before, after = old.config, new.config
    if before == after:
        return []
    if not isinstance(before, dict | None) or not isinstance(after, dict | None):
        return [Difference(old.name, "config", before, after)]
    left, right = before or {}, after or {}
    keys = [*left, *(key for key in right if key not in left)]
    return [
        Difference(old.name, key, left.get(key), right.get(key))
        for key in keys
        if left.get(key) != right.get(key) or (key in left) != (key in right)  # None is not absent
    ]
