"""Verdict of a search in sentences, and the gain of each method.

Which method brought how much: from the baseline to the winner, change by change.

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
from atorch_ns.report.info.candidates import Figure, Source, is_planned, peak, seconds
from atorch_ns.search import Row, SearchOutcome, Setting
from atorch_ns.text import (
    bytes_text,
    compared_text,
    count_text,
    counted,
    percent_text,
    seconds_text,
    with_period,
)

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


def setting_text(setting: Setting) -> str:
    """What was searched for, in one line."""
    nodes = f" on {setting.num_nodes} nodes" if setting.num_nodes > 1 else ""
    tokens = f" of {setting.num_tokens} tokens" if setting.num_tokens > 1 else ""
    limit = bytes_text(setting.memory_limit_bytes or None)
    return (
        f"{setting.model}, {count_text(setting.num_parameters)} parameters; {setting.world_size} × "
        f"{setting.device}{nodes}, limit {limit} a rank; global batch {setting.global_batch} samples{tokens}"
    )


def verdict(outcome: SearchOutcome) -> tuple[str, ...]:
    """The choice, its figures, how sure it is, and why the search ended: a sentence each."""
    sentences = [*_choice(outcome), *_certainty(outcome)]
    if is_planned(outcome):
        trials = "No trial was run: every figure is a prediction"
    else:
        resumed = f", {outcome.resumed} of them from an earlier search" if outcome.resumed else ""
        trials = f"{counted(outcome.num_trials + outcome.resumed, 'trial')}{resumed}"
    if outcome.unchecked:
        sentences.append(f"Not checked: {outcome.unchecked}. `atorch-ns verify` compares it with one process")
    sentences.append(f"{trials}, {seconds_text(outcome.seconds)} in all; {_ended(outcome)}")
    return tuple(with_period(text) for text in sentences if text)


def _choice(outcome: SearchOutcome) -> list[str]:
    winner, baseline = outcome.winner, outcome.baseline
    if winner is None:
        nearest = [f"Nearest: {outcome.nearest_miss}"] if outcome.nearest_miss else []
        number = len(outcome.rows)
        none = (
            "The only candidate cannot be used" if number == 1 else f"None of {number} candidates can be used"
        )
        return [none, *nearest]
    time, memory = seconds(winner), peak(winner)
    sentences = [
        f"Chosen: {winner.candidate.label}",
        f"One step takes {time.as_seconds()}; {_against(outcome, time)}",
        f"Peak memory {memory.as_bytes()} of {bytes_text(outcome.setting.memory_limit_bytes or None)} a rank",
    ]
    if winner.reason:
        sentences.append(f"Why: {winner.reason}")
    if baseline is winner and is_planned(outcome):
        sentences.append("The baseline itself is the best: nothing else is predicted to be better")
    elif baseline is winner:
        others = any(row.trial is not None for row in outcome.rows if row is not baseline)
        sentences.append(
            "The baseline itself is the best: nothing else that was tried is faster beyond the noise"
            if others
            else "Nothing but the baseline was tried"
        )
    return sentences


def _against(outcome: SearchOutcome, time: Figure) -> str:
    baseline = outcome.baseline
    if baseline is None or baseline is outcome.winner:
        return "it is the baseline" if baseline is not None else "there is no baseline to hold it against"
    other = seconds(baseline)
    if baseline.fate in ("failed", "pruned") or not other.value or not time.value:
        return f"the baseline {baseline.candidate.label} cannot be used: {baseline.reason}"
    times = compared_text(other.value / time.value, f"the baseline {baseline.candidate.label}")
    return f"{times} with {other.as_seconds()}"


def _certainty(outcome: SearchOutcome) -> list[str]:
    sentences = []
    if outcome.lower_bound_seconds is not None:
        bound = seconds_text(outcome.lower_bound_seconds)
        gap = (
            f": at most {percent_text(outcome.gap)} of the step is left to gain"
            if outcome.gap is not None
            else ""
        )
        sentences.append(f"No candidate is expected below {bound}{gap} (predicted)")
    if outcome.noise:
        sentences.append(f"The noise of a median step was {percent_text(outcome.noise)} (measured)")
    return sentences


def _ended(outcome: SearchOutcome) -> str:
    return outcome.stop_reason or "the search ended"
