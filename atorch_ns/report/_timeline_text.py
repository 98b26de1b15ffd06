"""A pipeline's timeline for terminals, and its figures as a table."""

from __future__ import annotations

from atorch_ns.report._sheets import Sheet
from atorch_ns.report._tables import TEXT_WIDTH
from atorch_ns.report._timeline import TimelineInfo, TimelineRow
from atorch_ns.report._units import counted, percent_text, seconds_text

__all__ = ["KIND_NAMES", "timeline_sentence", "timeline_sheet", "timeline_text"]

KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}

_ROWS = 16
_IDLE = "·"
_LABEL, _SHARE = len("  rank 0000  "), len("  100% idle")


def timeline_sentence(info: TimelineInfo) -> str:
    """What the timeline shows, in a sentence."""
    ranks, batches = (
        counted(len(info.rows), "rank"),
        counted(info.num_micro_batches, "micro-batch", "micro-batches"),
    )
    stages = f" with {info.num_laps} stages each" if info.num_laps > 1 else ""
    return (
        f"{info.schedule} on {ranks}{stages}, {batches}: the passes take {seconds_text(info.step_seconds)}, "
        f"ranks are idle for {percent_text(info.bubble_share)} of it (predicted)."
    )


def timeline_text(info: TimelineInfo, *, width: int = TEXT_WIDTH) -> str:
    """A line of letters for each rank: a letter is a slice of time, and says which pass is running.

    Small letters are the passes of a rank's later stages.

    Args:
        info: of the step.
        width: characters of a line.
    """
    lengths = (block.end - block.start for row in info.rows for block in row.blocks)
    shortest = min((length for length in lengths if length > 0), default=1.0)
    # No more slices than there are passes to tell apart, no more than there is room for.
    columns = min(max(10, width - _LABEL - _SHARE), max(1, round(info.step_seconds / shortest)))
    shown = info.first(_ROWS)
    lines = [
        f"  rank {row.rank:<4}  {_letters(row, info.step_seconds, columns)}  {percent_text(row.idle_share)} idle"
        for row in shown
    ]
    hidden = len(info.rows) - len(shown)
    if hidden:
        lines.append(f"  and {counted(hidden, 'rank')} between them")
    legend = ", ".join(f"{kind} {KIND_NAMES[kind]}" for kind in info.kinds)
    small = "; small letters: a rank's later stages" if info.num_laps > 1 else ""
    return "\n".join([timeline_sentence(info), *lines, f"  {legend}, {_IDLE} idle{small}"])


def timeline_sheet(info: TimelineInfo) -> Sheet:
    """Each rank's figures."""
    rows = tuple(
        (
            str(row.rank),
            ", ".join(map(str, row.stages)),
            seconds_text(row.busy_seconds),
            percent_text(row.idle_share),
            " + ".join(map(str, row.live_micro_batches)),
        )
        for row in info.rows
    )
    return Sheet(("rank", "stages", "busy", "idle", "micro-batches held at most"), rows, frozenset())


def _letters(row: TimelineRow, step_seconds: float, columns: int) -> str:
    """The pass that runs at the middle of each slice."""
    letters, blocks = [], iter(row.blocks)
    block = next(blocks, None)
    for column in range(columns):
        moment = (column + 0.5) * step_seconds / columns
        while block is not None and block.end <= moment:
            block = next(blocks, None)
        running = block is not None and block.start <= moment
        assert block is not None or not running
        letters.append((block.kind.lower() if block.lap else block.kind) if running and block else _IDLE)
    return "".join(letters)
