"""Verdict of a search in sentences, and the gain of each method.

The changes between the two strategies span a lattice (every subset of them applied to the baseline). Of the
subsets that the search has a candidate for, the longest chain from none to all is shown: each link is a bar.
Changes that only work together, such as one wrapper in place of another, stay one bar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from atorch_ns.cluster.process_memory import LONG_RUN
from atorch_ns.estimate import TimeParts
from atorch_ns.report.info.candidates import Source, is_planned, peak, seconds
from atorch_ns.search import Row, SearchOutcome, SearchSetting
from atorch_ns.search.outcome import SingleProcess
from atorch_ns.text import (
    bytes_text,
    compared_text,
    count_noun,
    count_text,
    percent_text,
    seconds_text,
    with_period,
)

_MOST_CHANGES = 8  # 256 subsets; more changes than that are one bar

_ABSENT = object()  # None is a config
_Link = tuple[frozenset[str], Row]  # the changes up to a row, and the row


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
    """Change of one part of the predicted time, in seconds."""

    name: str
    before: float
    after: float


class WaterfallInfo(NamedTuple):
    """Differences between the baseline and the winner.

    Attributes:
        baseline, winner, baseline_seconds, winner_seconds: their labels and steps.
        bars: the links; empty if the baseline won.
        parts: the same difference by parts of the predicted time, without unchanged parts.
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
    bars = tuple(_build_bars(outcome, baseline, winner)) if baseline is not winner else ()
    return WaterfallInfo(
        baseline.candidate.label, winner.candidate.label, start, end, bars, _part_changes(baseline, winner)
    )


def _build_bars(outcome: SearchOutcome, baseline: Row, winner: Row) -> Iterator[WaterfallBar]:
    old, new = dict(baseline.candidate.steps), dict(winner.candidate.steps)
    methods = [name for name in {**old, **new} if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    weakest = ("measured", "corrected", "predicted", "unknown")  # the weakest last
    for (before, first), (after, second) in pairwise(_longest_chain(outcome, baseline, winner, methods)):
        label = ", ".join(_change_text(name, old, new) for name in methods if name in after - before)
        figures = seconds(first), seconds(second)
        source = max((figure.source for figure in figures), key=weakest.index)
        yield WaterfallBar(label, figures[0].value or 0.0, figures[1].value or 0.0, source)


def _longest_chain(outcome: SearchOutcome, baseline: Row, winner: Row, methods: list[str]) -> list[_Link]:
    """The longest chain from the baseline to the winner: the changes made up to each row, and the row."""
    everything = frozenset(methods)
    if len(methods) > _MOST_CHANGES:
        return [(frozenset(), baseline), (everything, winner)]
    old, new = dict(baseline.candidate.steps), dict(winner.candidate.steps)
    row_of = {_steps_key(row.candidate.steps): row for row in outcome.rows if seconds(row).value is not None}
    chains: dict[frozenset[str], list[_Link]] = {frozenset(): [(frozenset(), baseline)]}  # by the changes
    for size in range(1, len(methods) + 1):  # all subsets of a subset come before it
        for subset in map(frozenset, combinations(methods, size)):
            # The baseline with the changes of this subset, if the search has a candidate like it.
            configs = {name: (new if name in subset else old).get(name, _ABSENT) for name in {**old, **new}}
            steps = [(name, config) for name, config in configs.items() if config is not _ABSENT]
            row = winner if subset == everything else row_of.get(_steps_key(steps))
            if row is not None:
                below = [chain for changes, chain in chains.items() if changes < subset]
                longest = max(below, key=lambda chain: (len(chain), _num_measured(chain)))
                chains[subset] = [*longest, (subset, row)]
    return chains[everything]


def _num_measured(chain: Iterable[_Link]) -> int:
    return sum(seconds(row).source == "measured" for _, row in chain)


def _steps_key(steps: Iterable[tuple[str, Any]]) -> frozenset[str]:
    return frozenset(f"{name} {json.dumps(config or None, sort_keys=True)}" for name, config in steps)


def _change_text(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if name not in old:
        return f"+ {name}"
    return f"- {name}" if name not in new else f"{name}: {_json_text(old[name])} → {_json_text(new[name])}"


def _json_text(config: Any) -> str:
    return json.dumps(config or {}, ensure_ascii=False).strip("{}").replace('"', "") or "defaults"


def _part_changes(baseline: Row, winner: Row) -> tuple[PartChange, ...]:
    first, second = baseline.candidate.estimate, winner.candidate.estimate
    if first is None or second is None:
        return ()
    pairs = zip(TimeParts._fields, first.time, second.time, strict=True)
    return tuple(PartChange(name, before, after) for name, before, after in pairs if before != after)


def setting_text(setting: SearchSetting) -> str:
    """Model, machine and workload of a search, in one line."""
    nodes = f" on {setting.num_nodes} nodes" if setting.num_nodes > 1 else ""
    tokens = f" of {setting.num_tokens} tokens" if setting.num_tokens > 1 else ""
    limit = bytes_text(setting.memory_limit_bytes or None)
    return (
        f"{setting.model}, {count_text(setting.num_parameters)} parameters; {setting.world_size} × "
        f"{setting.device}{nodes}, limit {limit} per rank; global batch {setting.global_batch} samples{tokens}"
    )


def verdict(outcome: SearchOutcome) -> tuple[str, ...]:
    """The choice, its figures, how sure it is, and why the search ended: a sentence each."""
    sentences = [*_choice_sentences(outcome), *_certainty_sentences(outcome)]
    if is_planned(outcome):
        trials = "Every figure is a prediction. No trials"
    else:
        earlier = f", {outcome.resumed} of them from an earlier search" if outcome.resumed else ""
        trials = f"{count_noun(outcome.num_trials + outcome.resumed, 'trial')}{earlier}"
    if outcome.unchecked:
        sentences.append(f"Not checked: {outcome.unchecked}. `atorch-ns verify` compares it with one process")
    took = seconds_text(outcome.seconds)
    sentences.append(f"{trials}, {took} in total; {outcome.stop_reason or 'the search ended'}")
    return tuple(with_period(text) for text in sentences if text)


def _choice_sentences(outcome: SearchOutcome) -> list[str]:
    winner, baseline = outcome.winner, outcome.baseline
    if winner is None:
        alone = len(outcome.rows) == 1
        every = "The only candidate cannot" if alone else f"None of the {len(outcome.rows)} candidates can"
        return [f"{every} be used", outcome.nearest_miss]
    sentences = [
        f"Chosen: {winner.candidate.label}",
        f"One step takes {seconds(winner).as_seconds()}. {_gain_text(outcome, winner)}",
        _memory_sentence(winner, outcome),
    ]
    single = outcome.single_process
    if single is not None:
        index = 0 if single.is_as_fast else 2  # first where it is the advice
        sentences.insert(index, _single_text(single, winner, outcome.setting.world_size))
    if winner.reason:
        sentences.append(f"Why: {winner.reason}")
    if baseline is winner and is_planned(outcome):
        sentences.append("The baseline is the best: no other candidate is reliably predicted to be better")
    elif baseline is winner:
        others = any(row.trial is not None for row in outcome.rows if row is not baseline)
        best = "The baseline is the best: no other trial was faster beyond the noise"
        sentences.append(best if others else "Only the baseline was tried")
    return sentences


def _single_text(single: SingleProcess, winner: Row, num_ranks: int) -> str:
    if not single.trial.succeeded:
        return f"It is not known whether one process is as fast: {single.trial.reason or single.trial.status}"
    with_precision = f" with {winner.candidate.precision}" if winner.candidate.precision else ""
    alone = seconds(replace(winner, trial=single.trial))  # as a row of its own
    takes = f"takes {alone.as_seconds()} for the same batch{with_precision}"
    if not single.is_as_fast:
        return f"One process {takes}"
    ranks = f"The best strategy on {num_ranks} ranks takes {seconds(winner).as_seconds()}"
    is_tied = (alone.value or 0.0) > (seconds(winner).value or 0.0)  # slower by less than the noise
    return f"Use one process: it {takes}. {ranks}{', the same within the noise' if is_tied else ''}"


def _memory_sentence(winner: Row, outcome: SearchOutcome) -> str:
    tensors, limit = peak(winner).as_bytes(), bytes_text(outcome.setting.memory_limit_bytes or None)
    trial = winner.trial
    if trial is None or not trial.succeeded or not trial.process_bytes:
        return f"Peak memory: {tensors} of {limit} per rank"
    most, further = max(trial.process_bytes), max(trial.further_bytes, default=0)
    more = f". A run of {LONG_RUN:,} steps is expected to need {bytes_text(further)} more" if further else ""
    limit_note = ". The system enforced the limit" if trial.enforced else ""
    return (
        f"Peak memory: {bytes_text(most)} of {limit} per rank (measured), beyond what the process held at the start{limit_note}. "
        f"Tensors are {tensors} of it{more}"
    )


def _gain_text(outcome: SearchOutcome, winner: Row) -> str:
    # First over the best plain strategy of its precision, then of this precision over the usual one.
    baseline = outcome.baseline
    if baseline is None or baseline is winner:
        return "This is the baseline" if baseline is not None else "There is no baseline to compare with"
    if baseline.fate in ("failed", "pruned") or not seconds(baseline).value or not seconds(winner).value:
        return f"The baseline {baseline.candidate.label} cannot be used: {baseline.reason}"
    precision, usual = winner.candidate.precision, baseline.candidate.precision
    plain = _best_plain(outcome, precision)
    if plain is None or plain is winner:
        alike = "" if precision == usual else f". This includes the gain of {precision}"
        return f"It is {_speedup_text(winner, baseline)}{alike}"
    if precision == usual:
        return f"It is {_speedup_text(winner, plain)}"
    gain = _speedup_text(plain, _best_plain(outcome, usual) or baseline)
    return f"It is {_speedup_text(winner, plain)} in the same precision. {precision} alone is {gain}"


def _best_plain(outcome: SearchOutcome, precision: str) -> Row | None:
    # The fastest. Measured rows come before unmeasured ones.
    usable = (row for row in outcome.rows if row.fate not in ("failed", "pruned") and seconds(row).value)
    plain = [row for row in usable if row.candidate.is_plain and row.candidate.precision == precision]
    return min(plain, key=lambda row: (row.trial is None, seconds(row).value), default=None)


def _speedup_text(row: Row, other: Row) -> str:
    name = f"the {'baseline' if other.candidate.is_baseline else 'plain'} {other.candidate.label}"
    ratio = (seconds(other).value or 0.0) / (seconds(row).value or 1.0)
    return f"{compared_text(ratio, name)}, which takes {seconds(other).as_seconds()}"


def _certainty_sentences(outcome: SearchOutcome) -> list[str]:
    sentences = []
    if (beside := outcome.beside) is not None:
        low, middle, high = (bytes_text(value) for value in (beside.low, beside.middle, beside.high))
        trials = count_noun(beside.num_trials, "trial")
        sentences.append(f"Memory beyond tensors: {middle} per rank ({low} to {high}, measured in {trials})")
    if outcome.lower_bound_seconds is not None:
        bound, gap = seconds_text(outcome.lower_bound_seconds), outcome.gap
        remainder = "" if gap is None else f", so at most {percent_text(gap)} of the step is left to gain"
        sentences.append(f"No candidate is likely to take less than {bound}{remainder} (predicted)")
    if outcome.noise:
        sentences.append(f"The noise of the median step time was {percent_text(outcome.noise)} (measured)")
    return sentences
