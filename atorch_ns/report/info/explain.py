"""Explanations of a choice, read off a search or off the methods of a strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.method import Chosen, Registry, clash, resolve
from atorch_ns.report.info.candidates import is_planned, peak, seconds
from atorch_ns.report.info.verdict import verdict
from atorch_ns.search import Row, SearchOutcome
from atorch_ns.strategy import Strategy
from atorch_ns.text import bytes_text, change_text, count_noun, did_you_mean, seconds_text, with_period


def explain_strategy(strategy: Strategy, cluster: Cluster, registry: Registry) -> tuple[str, ...]:
    """Each method in order of application and why it is there; then where the strategy came from.

    Raises:
        StrategyError: if it cannot be used on the cluster.
    """
    resolution = resolve(strategy, cluster, registry)
    # A device that the strategy does not record is not claimed.
    device = f", {strategy.requires.device}" if strategy.requires.device else ""
    lines = [f"{strategy}, on {count_noun(cluster.world_size, 'process', 'processes')}{device}"]
    for item in resolution.chosen:
        settings = item.config.as_json()
        suffix = f" [{json.dumps(settings, ensure_ascii=False)}]" if settings else ""
        lines.append(f"  {item.method.name}: {item.method.explain(item.config, cluster)}{suffix}")
    lines += [f"  {note.text}" for note in resolution.notes]
    lines += [
        f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in strategy.provenance.items()
    ]
    return tuple(lines)


def explain_method(strategy: Strategy, name: str, cluster: Cluster, registry: Registry) -> tuple[str, ...]:
    """Explains why a method is in a strategy, or whether it could be.

    Raises:
        MethodNotFoundError: if no installed method has this name.
    """
    return tuple(_method_text(strategy, registry.get(name).name, cluster, registry))


def _method_text(strategy: Strategy, name: str, cluster: Cluster, registry: Registry) -> Iterator[str]:
    method = registry.get(name)
    choices = resolve(strategy, cluster, registry).chosen
    mine = next((item for item in choices if item.method.name == name), None)
    if mine is not None:
        yield with_period(f"{name} is in the strategy: {method.explain(mine.config, cluster)}")
        return
    yield f"{name} is not in the strategy. {method.summary}"
    config = method.Config()
    absent = method.unavailable(config, cluster)
    if absent is not None:
        yield with_period(f"  It would be left out here: {absent}")
    reasons = [(item, clash(Chosen(method, config), item)) for item in choices]
    for item, reason in reasons:
        if reason is not None:
            yield f"  It cannot be combined with {item.method.name}: {reason}"
    if absent is None and not any(reason for _, reason in reasons):
        yield "  It could be added. The report of a search (report.json) would show its cost."


def explain_search(outcome: SearchOutcome) -> tuple[str, ...]:
    """Names the choice, and why every tried candidate lost. The others are counted."""
    lines = list(verdict(outcome))
    others = [row for row in outcome.rows if row.candidate.key != outcome.best]
    tried_rows = [row for row in others if row.trial is not None]
    rest = [row for row in others if row.trial is None]
    first_rows, title = rest[:8], "Not chosen:" if is_planned(outcome) else "Not tried:"
    for head, rows in (("Tried and not chosen:", tried_rows), (title, first_rows)):
        if rows:
            lines += [head, *(f"  {row.candidate.label}: {_fate_text(row)}" for row in rows)]
    if len(rest) > len(first_rows):
        lines.append(f"  and {len(rest) - len(first_rows)} more; --why explains one")
    return tuple(lines)


def explain_why(outcome: SearchOutcome, name: str) -> tuple[str, ...]:
    """Explains why a candidate, or a method, was chosen or not.

    Args:
        name: a method's name, or a candidate's key, its number (``"#3"``) or its whole label. A name that is
            both a method and a label means the method.

    Raises:
        InputError: if nothing goes by that name; near ones are named.
    """
    methods = dict.fromkeys(step for each in outcome.rows for step, _ in each.candidate.steps)
    if name in methods:
        return tuple(_of_method(outcome, name))
    for number, row in enumerate(outcome.rows, 1):
        if name in (row.candidate.key, f"#{number}", str(number), row.candidate.label):
            return tuple(_of_candidate(outcome, row))
    names = [*methods, *(each.candidate.key for each in outcome.rows)]
    hint = did_you_mean(name, names, otherwise=f"Methods: {', '.join(methods)}.")
    raise InputError(
        f"nothing in this search is called {name!r}.{hint} Give a candidate's key, its number (#1 to "
        f"#{len(outcome.rows)}) or its whole label."
    )


def _of_candidate(outcome: SearchOutcome, row: Row) -> Iterator[str]:
    yield f"{row.candidate.label} ({row.candidate.key}): {_fate_text(row)}"
    time, memory = seconds(row), peak(row)
    yield f"  step: {time.as_seconds()}; peak: {memory.as_bytes()}"
    yield from _compare_with_winner(outcome, row)
    if row.trial is not None and row.trial.log:
        yield f"  log of its trial: {row.trial.log}"


def _compare_with_winner(outcome: SearchOutcome, row: Row) -> Iterator[str]:
    winner = outcome.winner
    if winner is None or winner is row:
        return
    estimate, reference = row.candidate.estimate, winner.candidate.estimate
    if estimate is None or reference is None:
        return
    yield f"  compared with {winner.candidate.label} (predicted):"
    for title, before, after, text in (
        ("step", reference.time._asdict(), estimate.time._asdict(), seconds_text),
        ("peak", reference.memory._asdict(), estimate.memory._asdict(), bytes_text),
    ):
        changes = [
            f"{name} {text(before[name])} → {text(after[name])}"
            for name in before
            if abs(after[name] - before[name]) > 0.005 * max(sum(before.values()), 1e-12)  # half a percent
        ]
        whole = sum(after.values()) / sum(before.values()) - 1 if sum(before.values()) else None
        yield f"    {title} {change_text(whole)}: {', '.join(changes) or 'unchanged'}"


def _of_method(outcome: SearchOutcome, name: str) -> Iterator[str]:
    having = [row for row in outcome.rows if _has_method(row, name)]
    without = [row for row in outcome.rows if not _has_method(row, name)]
    winner = outcome.winner
    is_chosen = winner is not None and _has_method(winner, name)
    yield f"{name} is {'in' if is_chosen else 'not in'} the chosen strategy."
    if is_chosen and winner is not None:
        figures = f"{seconds(winner).as_seconds()}, {peak(winner).as_bytes()}"
        yield f"  The best candidate with it is the chosen one, {winner.candidate.label}: {figures}"
    # The method is held against the other side: candidates without it if it was chosen, else with it.
    others = without if is_chosen else having
    rival = _best_row(others, outcome)
    preposition = "without" if is_chosen else "with"
    if rival is None:
        yield f"  No candidate {preposition} it could be used. {_example_text(others)}"
        return
    figures = f"{seconds(rival).as_seconds()}, {peak(rival).as_bytes()}"
    yield f"  The best candidate {preposition} it is {rival.candidate.label}: {figures}; {_fate_text(rival)}"
    yield from _compare_with_winner(outcome, rival)
    failures = [row for row in others if row.fate in ("failed", "pruned")]
    if failures:
        yield f"  {len(failures)} of {len(others)} candidates {preposition} it failed or were pruned. {_example_text(failures)}"


def _has_method(row: Row, name: str) -> bool:
    return any(step == name for step, _ in row.candidate.steps)


def _best_row(rows: Sequence[Row], outcome: SearchOutcome) -> Row | None:
    figure = peak if outcome.settings.objective == "memory" else seconds
    usable = [row for row in rows if row.fate not in ("failed", "pruned") and figure(row).value is not None]
    tried_rows = [row for row in usable if figure(row).source == "measured"]
    return min(tried_rows or usable, key=lambda row: figure(row).value or 0.0, default=None)  # measured first


def _example_text(rows: Sequence[Row]) -> str:
    return f"For example, {rows[0].candidate.label}: {_fate_text(rows[0])}" if rows else ""


def _fate_text(row: Row) -> str:
    reason = row.reason or (row.candidate.pruned.reason if row.candidate.pruned else "")
    if row.fate == "untried" and reason.startswith(("predicted", "not tried")):
        return reason  # which says it already
    return f"{row.fate}: {reason}" if reason else row.fate
