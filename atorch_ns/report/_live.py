"""The live table of a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atorch_ns.report._progress import Progress
from atorch_ns.report._units import bytes_text, measured_text, seconds_text
from atorch_ns.report._verdict import setting_text
from atorch_ns.search import Candidate

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["live_view"]


def live_view(progress: Progress, num_rows: int) -> RenderableType:
    """What is known so far: the setting, the candidates worth a line, and what goes on.

    Args:
        progress: of the search.
        num_rows: candidates shown at most.
    """
    from rich.console import Group
    from rich.text import Text

    head = setting_text(progress.setting) if progress.setting is not None else progress.doing
    best = progress.candidates.get(progress.best or "")
    so_far = f"   best so far: {best.label}, {seconds_text(progress.best_seconds())}" if best else ""
    foot = f"{progress.elapsed_text()}   {progress.doing}{so_far}"
    parts: list[RenderableType] = [Text(head)]
    if progress.candidates:
        parts.append(_table(progress, num_rows))
    parts += [Text(note, style="yellow") for note in progress.notes[-3:]]
    parts.append(Text(foot))
    return Group(*parts)


def _table(progress: Progress, num_rows: int) -> RenderableType:
    from rich import box
    from rich.table import Table

    shown = _shown(progress, num_rows)
    hidden = len(progress.candidates) - len(shown)
    pruned = sum(candidate.pruned is not None for candidate in progress.candidates.values())
    caption = f"{hidden} more not shown, {pruned} pruned by the estimate" if hidden else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    table.add_column("strategy", overflow="ellipsis", no_wrap=True, ratio=1, min_width=20)
    for name in ("step predicted", "peak predicted", "step measured", "peak measured"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for candidate in shown:
        state, style = _state(progress, candidate)
        table.add_row(*_cells(progress, candidate), state, style=style)
    return table


def _cells(progress: Progress, candidate: Candidate) -> tuple[str, ...]:
    estimate, trial = candidate.estimate, progress.trials.get(candidate.key)
    succeeded = trial is not None and trial.succeeded
    spread = trial.noise_seconds if trial and len(trial.step_seconds) > 1 else None
    return (
        candidate.label + (" (baseline)" if candidate.is_baseline else ""),
        seconds_text(estimate.step_seconds if estimate else None),
        bytes_text(estimate.peak_bytes if estimate else None),
        measured_text(trial.median_seconds, spread) if trial and succeeded else "",
        bytes_text(max(trial.peak_bytes)) if trial and succeeded and trial.peak_bytes else "",
    )


def _state(progress: Progress, candidate: Candidate) -> tuple[str, str]:
    """The state in words, and a style that says it again."""
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


def _shown(progress: Progress, num_rows: int) -> list[Candidate]:
    """Baseline, what runs, what was tried, then what comes next by the estimate."""

    def rank(candidate: Candidate) -> int:
        if candidate.is_baseline or candidate.key == progress.best:
            return 0
        if progress.running is not None and candidate.key == progress.running.key:
            return 1
        if candidate.key in progress.trials:
            return 2
        return 3 if candidate.pruned is None else 4

    ranked = sorted(progress.candidates.values(), key=rank)[:num_rows]
    chosen = {candidate.key for candidate in ranked}
    return [candidate for candidate in progress.candidates.values() if candidate.key in chosen]
