"""Which method brought how much: from the baseline to the winner, change by change.

The changes between the two strategies span a lattice (every subset of them applied to the baseline). Of the
subsets that the search has a candidate for, the longest chain from none to all is shown: each link is a bar.
Changes that only work together, such as one wrapper in place of another, stay one bar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from atorch_ns.estimate import TimeParts
from atorch_ns.report._measures import Source, seconds
from atorch_ns.search import Row, SearchOutcome

__all__ = ["PartChange", "WaterfallBar", "WaterfallInfo", "waterfall_info"]

_MOST_CHANGES = 8  # 256 subsets; more changes than that are one bar

Change = tuple[str, Any | None, Any | None]


class WaterfallBar(NamedTuple):
    """One link of the chain.

    Attributes:
        label: the changes, as ``"+ checkpoint"``.
        before, after: step seconds without and with them.
        source: the weaker of the two figures' sources.
    """

    label: str
    before: float
    after: float
    source: Source

    @property
    def change(self) -> float:
        """Seconds that the step became longer by; negative is faster."""
        return self.after - self.before


class PartChange(NamedTuple):
    """How one part of the predicted time changed, in seconds."""

    name: str
    before: float
    after: float


class WaterfallInfo(NamedTuple):
    """From the baseline to the winner.

    Attributes:
        baseline, winner: their labels.
        baseline_seconds, winner_seconds: their steps.
        bars: the links; empty if the baseline won.
        parts: the same difference by parts of the predicted time, unchanged parts left out.
    """

    baseline: str
    winner: str
    baseline_seconds: float
    winner_seconds: float
    bars: tuple[WaterfallBar, ...]
    parts: tuple[PartChange, ...]


def waterfall_info(outcome: SearchOutcome) -> WaterfallInfo | None:
    """The chain; ``None`` without a baseline or a winner with known steps."""
    baseline, winner = outcome.baseline, outcome.winner
    if baseline is None or winner is None:
        return None
    start, end = seconds(baseline).value, seconds(winner).value
    if start is None or end is None:
        return None
    bars: tuple[WaterfallBar, ...] = ()
    if baseline is not winner:
        bars = tuple(_bars(_chain(outcome, baseline, winner)))
    return WaterfallInfo(
        baseline.candidate.label, winner.candidate.label, start, end, bars, _parts(baseline, winner)
    )


def _chain(outcome: SearchOutcome, baseline: Row, winner: Row) -> list[tuple[tuple[Change, ...], Row]]:
    """The links: the changes of each, and the row that they lead to; the baseline first, without changes."""
    changes = _changes(baseline.candidate.steps, winner.candidate.steps)
    known = {_identity(row.candidate.steps): row for row in outcome.rows if seconds(row).value is not None}
    ends = [((), baseline), (changes, winner)]
    if len(changes) > _MOST_CHANGES:
        return _links(ends)
    chains: dict[frozenset[int], list[tuple[tuple[Change, ...], Row]]] = {frozenset(): [((), baseline)]}
    for size in range(1, len(changes) + 1):
        for chosen in combinations(range(len(changes)), size):
            subset = tuple(changes[index] for index in chosen)
            row = winner if size == len(changes) else known.get(_applied(baseline, subset))
            if row is None:
                continue
            below = [chains[part] for part in chains if part < frozenset(chosen)]
            longest = max(below, key=lambda chain: (len(chain), _measured_rows(chain)))
            chains[frozenset(chosen)] = [*longest, (subset, row)]
    return _links(chains[frozenset(range(len(changes)))])


def _links(chain: list[tuple[tuple[Change, ...], Row]]) -> list[tuple[tuple[Change, ...], Row]]:
    """The chain with what each link adds to the one before, instead of all changes up to it."""
    links = [chain[0]]
    for (before, _), (after, row) in pairwise(chain):
        links.append((tuple(change for change in after if change not in before), row))
    return links


def _measured_rows(chain: Iterable[tuple[tuple[Change, ...], Row]]) -> int:
    return sum(seconds(row).source == "measured" for _, row in chain)


def _bars(chain: list[tuple[tuple[Change, ...], Row]]) -> Iterable[WaterfallBar]:
    weakest = ("measured", "corrected", "predicted", "unknown")
    for (_, before), (changes, after) in pairwise(chain):
        first, second = seconds(before), seconds(after)
        source = max(first.source, second.source, key=weakest.index)
        label = ", ".join(_change_text(change) for change in changes)
        yield WaterfallBar(label, first.value or 0.0, second.value or 0.0, source)


def _changes(before: Iterable[tuple[str, Any]], after: Iterable[tuple[str, Any]]) -> tuple[Change, ...]:
    old, new = {name: (config,) for name, config in before}, {name: (config,) for name, config in after}
    names = dict.fromkeys([*old, *new])
    return tuple((name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def _applied(baseline: Row, changes: Iterable[Change]) -> frozenset[str]:
    steps = {name: (config,) for name, config in baseline.candidate.steps}
    for name, _, after in changes:
        if after is None:
            steps.pop(name, None)
        else:
            steps[name] = after
    return _identity((name, config[0]) for name, config in steps.items())


def _identity(steps: Iterable[tuple[str, Any]]) -> frozenset[str]:
    return frozenset(f"{name} {json.dumps(config or None, sort_keys=True)}" for name, config in steps)


def _change_text(change: Change) -> str:
    name, before, after = change
    if before is None:
        return f"+ {name}"
    return f"- {name}" if after is None else f"{name}: {_short(before[0])} → {_short(after[0])}"


def _short(config: Any) -> str:
    text = json.dumps(config or {}, ensure_ascii=False).strip("{}").replace('"', "")
    return text if text else "defaults"


def _parts(baseline: Row, winner: Row) -> tuple[PartChange, ...]:
    first, second = baseline.candidate.estimate, winner.candidate.estimate
    if first is None or second is None:
        return ()
    pairs = zip(TimeParts._fields, first.time, second.time, strict=True)
    return tuple(PartChange(name, before, after) for name, before, after in pairs if before != after)
