"""Progress of a search: what its events add up to, as lines of a log and as a live table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from atorch_ns.report.info.verdict import setting_text, verdict
from atorch_ns.search import (
    Candidate,
    Ended,
    Event,
    Priced,
    Profiling,
    SearchNote,
    SearchOutcome,
    SearchSetting,
    TrialEnded,
    TrialOutcome,
    TrialStarted,
)
from atorch_ns.text import UNKNOWN, bytes_text, count_noun, interval_text, measured_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType


class Progress:
    """State of a search, as its events describe it.

    Args:
        clock: seconds, monotonic.
        time_limit_s: time limit of the search, for the line that says how much is left.

    Attributes:
        doing: current activity, as text.
        setting: model, machine and workload; ``None`` before the candidates are priced.
        candidates: candidates by key, in the order of the estimate.
        trials: the last outcome of each candidate that was tried, by key.
        running: the candidate whose trial runs.
        number: number of the last trial that began.
        kind: kind of the last task, as in :class:`~atorch_ns.search.TrialTask`.
        best: key of the best candidate so far.
        notes: the search's notes, as sentences.
        outcome: outcome of the whole search, once it is over.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, time_limit_s: float | None = None
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._doing_since = self._began
        self._time_limit_s = time_limit_s
        self.doing = "starting"
        self.setting: SearchSetting | None = None
        self.candidates: dict[str, Candidate] = {}
        self.trials: dict[str, TrialOutcome] = {}
        self.running: Candidate | None = None
        self.number = 0
        self.best: str | None = None
        self.notes: list[str] = []
        self.outcome: SearchOutcome | None = None
        self.kind = "trial"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def doing_for_s(self) -> float:
        """Seconds since the current activity began."""
        return self._clock() - self._doing_since

    def elapsed_text(self) -> str:
        """Time so far, and the limit: ``"12.3 s of 120 s"``."""
        limit = f" of {seconds_text(self._time_limit_s)}" if self._time_limit_s else ""
        return f"{seconds_text(self.elapsed_s)}{limit}"

    def best_seconds(self) -> float | None:
        """Median step of the best candidate so far (measured)."""
        trial = self.trials.get(self.best or "")
        return trial.median_seconds if trial is not None and trial.succeeded else None

    def note(self, event: Event) -> None:
        """Updates the state by an event."""
        match event:
            case Profiling():
                self._set_activity(f"profiling {event.model}")
            case Priced():
                self.setting = event.setting
                self.candidates = {candidate.key: candidate for candidate in event.candidates}
                self._set_activity("preparing the trials")
            case TrialStarted():
                self.running, self.number = event.candidate, event.number
                self.kind = event.task.kind
                what = _DOING.get(self.kind, f"trial {event.number}:")
                again = f" (attempt {event.task.attempt + 1})" if event.task.attempt else ""
                self._set_activity(f"{what} {event.candidate.label}{again}")
            case TrialEnded():
                # A candidate whose numerics differ cannot be chosen: its trial counts as failed.
                failed_probe = self.kind == "probe" and event.outcome.status != "ok"
                if self.kind == "trial" or failed_probe:  # others give no step time of the candidate
                    self.trials[event.candidate.key] = event.outcome
                self.candidates.setdefault(event.candidate.key, event.candidate)
                self.running, self.best = None, event.best
                self._set_activity("choosing the next trial")
            case SearchNote():
                self.notes.append(event.text)
            case Ended():
                self.running, self.outcome, self.best = None, event.outcome, event.outcome.best
                self._set_activity("done")

    def _set_activity(self, doing: str) -> None:
        self.doing, self._doing_since = doing, self._clock()


_DOING = {"probe": "checking the numerics of", "single": "trial in one process, for comparison with"}

_WIDE = 120  # columns of a console on which the live table shows every figure

_SHOWN = 8  # candidates besides the baseline, unless all are asked for


def event_lines(event: Event, progress: Progress, *, verbose: bool) -> Iterator[str]:
    """Lines of a log for an event that ``progress`` already includes."""
    match event:
        case Profiling():
            yield f"profiling {event.model} on fake tensors"
        case Priced():
            yield from _priced_lines(event, verbose)
        case TrialStarted():
            prediction = "" if progress.kind != "trial" else f" {predicted_text(event.candidate)}"
            yield f"{progress.doing} …{prediction}"
        case TrialEnded() if progress.kind == "single":
            yield f"one process with the whole batch: {trial_text(event.outcome)}"
        case TrialEnded() if progress.kind == "probe":
            same = f"match one process ({event.outcome.reason})"
            result = same if event.outcome.status == "ok" else trial_text(event.outcome)
            yield f"numerics of {event.candidate.label}: {result}"
        case TrialEnded():
            best = progress.candidates.get(event.best or "")
            so_far = f"; best so far: {best.label}, {seconds_text(progress.best_seconds())}" if best else ""
            if best is not None and best.key == event.candidate.key:
                so_far = "; best so far"
            yield f"trial {event.number}: {event.candidate.label}: {trial_text(event.outcome)}{so_far}"
        case SearchNote():
            yield event.text
        case Ended():
            yield from verdict(event.outcome)
            for row in event.outcome.rows:
                if row.fate in ("lost", "failed") and (verbose or row.trial is not None):
                    yield f"  {row.fate}: {row.candidate.label}: {row.reason}"


def predicted_text(candidate: Candidate) -> str:
    """The prediction: ``"predicted 42.1 ms (40.0–58.0), 812 MiB (803–820)"``."""
    if candidate.estimate is None:
        return "not priced"
    estimate = candidate.estimate
    time = interval_text(estimate.step_seconds, estimate.step_seconds_interval, seconds_text)
    return f"predicted {time}, {interval_text(estimate.peak_bytes, estimate.peak_bytes_interval, bytes_text)}"


def trial_text(outcome: TrialOutcome) -> str:
    """Measurement, ``"42.1 ms ±0.3 ms (measured, n=12), peak 812 MiB"``, or failure with its reason."""
    if not outcome.succeeded:
        where = f" on rank {outcome.rank}" if outcome.rank is not None else ""
        log = f" (log: {outcome.log})" if outcome.log else ""
        return f"{outcome.status}{where}: {outcome.reason or 'no reason given'}{log}"
    num = len(outcome.step_seconds)
    step_text = measured_text(outcome.median_seconds, outcome.noise_seconds if num > 1 else None)
    memory = f", peak {bytes_text(max(outcome.peak_bytes))}" if outcome.peak_bytes else ""
    if outcome.process_bytes:
        memory += f" (tensors), {bytes_text(max(outcome.process_bytes))} (process)"
    early = ", stopped early" if outcome.status == "stopped early" else ""
    return f"{step_text} (measured, n={num}{early}){memory}"


def _priced_lines(event: Priced, verbose: bool) -> Iterator[str]:
    setting, candidates = event.setting, event.candidates
    pruned_candidates = [candidate for candidate in candidates if candidate.pruned is not None]
    profile, prices = seconds_text(setting.profile_seconds), seconds_text(setting.estimate_seconds)
    took = f"profiling {profile}, pricing {prices}"
    yield setting_text(setting)
    yield f"{count_noun(len(candidates), 'candidate')}, {len(pruned_candidates)} pruned ({took}):"
    usable = [candidate for candidate in candidates if candidate.pruned is None]
    baseline = [candidate for candidate in usable if candidate.is_baseline]
    others = [candidate for candidate in usable if not candidate.is_baseline]
    visible = others if verbose else others[:_SHOWN]
    for candidate in (*baseline, *visible):
        role = " (baseline)" if candidate.is_baseline else ""
        yield f"  {candidate.label}{role}: {predicted_text(candidate)}"
    if len(visible) < len(others):
        yield f"  … and {len(others) - len(visible)} more"
    if verbose:
        for candidate in pruned_candidates:
            reason = candidate.pruned.reason if candidate.pruned else ""
            yield f"  pruned: {candidate.label}: {reason}"


def live_view(progress: Progress, num_rows: int, *, width: int) -> RenderableType:
    """The setting, the first candidates, and the current activity, for a rich console.

    Args:
        num_rows: candidates shown at most.
        width: columns of the console; intervals and standard errors are left out if they do not fit.
    """
    from rich.console import Group
    from rich.text import Text

    head = setting_text(progress.setting) if progress.setting is not None else progress.doing
    best = progress.candidates.get(progress.best or "")
    so_far = f"   best so far: {best.label}, {seconds_text(progress.best_seconds())}" if best else ""
    foot = Text(f"{progress.elapsed_text()}   {progress.doing}{so_far}")
    parts: list[RenderableType] = [Text(head)]
    if progress.candidates:
        parts.append(_candidates_table(progress, num_rows, is_wide=width >= _WIDE))
    parts += [Text(note, style="yellow") for note in progress.notes[-3:]]  # the last three
    return Group(*parts, foot)


def _candidates_table(progress: Progress, num_rows: int, *, is_wide: bool) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    visible = _candidates_to_show(progress, num_rows)
    hidden = len(progress.candidates) - len(visible)
    num_pruned = sum(candidate.pruned is not None for candidate in progress.candidates.values())
    caption = f"{hidden} more not shown, {num_pruned} pruned by the estimate" if hidden else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    table.add_column("strategy", min_width=12)  # rich narrows columns that may wrap, which its cells do not
    for name in ("step\npredicted", "peak\npredicted", "step\nmeasured", "peak\nmeasured"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for candidate in visible:
        state, style = _state_and_style(progress, candidate)
        name, *figures = _row_cells(progress, candidate, is_wide)
        table.add_row(Text(name, no_wrap=True, overflow="ellipsis"), *figures, state, style=style)
    return table


def _row_cells(progress: Progress, candidate: Candidate, is_wide: bool) -> tuple[str, ...]:
    estimate, trial = candidate.estimate, progress.trials.get(candidate.key)
    has_succeeded = trial is not None and trial.succeeded
    spread = trial.noise_seconds if is_wide and trial and len(trial.step_seconds) > 1 else None
    times = estimate.step_seconds_interval if estimate and is_wide else None
    sizes = estimate.peak_bytes_interval if estimate and is_wide else None
    return (
        candidate.label + (" (baseline)" if candidate.is_baseline else ""),
        interval_text(estimate.step_seconds, times, seconds_text) if estimate else UNKNOWN,
        interval_text(estimate.peak_bytes, sizes, bytes_text) if estimate else UNKNOWN,
        measured_text(trial.median_seconds, spread) if trial and has_succeeded else "",
        bytes_text(max(trial.peak_bytes)) if trial and has_succeeded and trial.peak_bytes else "",
    )


def _state_and_style(progress: Progress, candidate: Candidate) -> tuple[str, str]:
    trial = progress.trials.get(candidate.key)
    if progress.running is not None and progress.running.key == candidate.key:
        return f"▶ running, {progress.doing_for_s:.0f} s", "bold"
    if candidate.key == progress.best:
        return "✓ best so far" if progress.outcome is None else "✓ won", "bold green"
    if trial is not None:
        return ("– slower", "") if trial.succeeded else (f"✗ {trial.status}", "red")
    if candidate.pruned is not None:
        return f"○ pruned ({candidate.pruned.kind})", "dim"
    return ("· waiting" if progress.outcome is None else "· not tried"), "dim"


def _candidates_to_show(progress: Progress, num_rows: int) -> list[Candidate]:
    # Baseline, the running candidate, tried ones, then the others in the order of the estimate.

    def rank(candidate: Candidate) -> int:
        if candidate.is_baseline or candidate.key == progress.best:
            return 0
        if progress.running is not None and candidate.key == progress.running.key:
            return 1
        if candidate.key in progress.trials:
            return 2
        return 3 if candidate.pruned is None else 4

    first = sorted(progress.candidates.values(), key=rank)[:num_rows]  # ties stay in the estimate's order
    keys = {candidate.key for candidate in first}
    return [candidate for candidate in progress.candidates.values() if candidate.key in keys]
