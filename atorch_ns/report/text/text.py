"""Text of a report, a search, an estimate, a pipeline's timeline and a step's operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from atorch_ns.cluster.measured import Comparison
from atorch_ns.estimate import Estimate
from atorch_ns.job import Report
from atorch_ns.report.info.accuracy import QUANTITIES, ActualInfo, accuracy_info
from atorch_ns.report.info.breakdown import Bar, TimelineInfo, TimelineRow, memory_info, time_info
from atorch_ns.report.info.candidates import (
    CandidatesInfo,
    ReportedNumber,
    candidates_info,
    fate_text,
    history_info,
)
from atorch_ns.report.info.operators import OperatorsInfo
from atorch_ns.report.info.verdict import setting_text, verdict, waterfall_info
from atorch_ns.report.text.tables import (
    TEXT_WIDTH,
    Table,
    accuracy_table,
    as_text,
    candidates_table,
    collectives_table,
    comparisons_table,
    history_table,
    memory_table,
    operators_table,
    parts_table,
    time_table,
    waterfall_table,
)
from atorch_ns.search import SearchOutcome
from atorch_ns.text import bytes_text, change_text, count_noun, percent_text, range_text, seconds_text

KIND_NAMES = {
    "F": "forward",
    "R": "recomputation",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}

_ROWS = 16  # ranks that are shown
_IDLE = "·"
_LABEL, _SHARE = len("  rank 0000  "), len("  100% idle")


def timeline_sentence(info: TimelineInfo) -> str:
    """The timeline in a sentence."""
    ranks = count_noun(len(info.rows), "rank")
    batches = count_noun(info.num_micro_batches, "micro-batch", "micro-batches")
    stages = f" with {info.num_laps} stages each" if info.num_laps > 1 else ""
    return (
        f"{info.schedule} on {ranks}{stages}, {batches}: the passes take {seconds_text(info.step_seconds)}, "
        f"and ranks are idle for {percent_text(info.bubble_share)} of that time ({'measured' if info.measured else 'predicted'})."
    )


def timeline_text(info: TimelineInfo, *, width: int = TEXT_WIDTH) -> str:
    """A line of letters for each rank: a letter is a slice of time, and says which pass is running.

    Small letters are the passes of a rank's later stages.

    Args:
        width: characters of a line.
    """
    lengths = (block.end - block.start for row in info.rows for block in row.blocks)
    shortest = min((length for length in lengths if length > 0), default=1.0)
    # No more slices than are needed to show the shortest pass, and no more than there is room for.
    columns = min(max(10, width - _LABEL - _SHARE), max(1, round(info.step_seconds / shortest)))
    rows = info.first(_ROWS)
    lines = [
        f"  rank {row.rank:<4}  {_timeline_letters(row, info.step_seconds, columns)}  {percent_text(row.idle_share)} idle"
        for row in rows
    ]
    hidden = len(info.rows) - len(rows)
    if hidden:
        lines.append(f"  and {count_noun(hidden, 'rank')} in between")
    legend = ", ".join(f"{kind} {KIND_NAMES[kind]}" for kind in info.kinds)
    small = "; small letters: a rank's later stages" if info.num_laps > 1 else ""
    return "\n".join([timeline_sentence(info), *lines, f"  {legend}, {_IDLE} idle{small}"])


def _timeline_letters(row: TimelineRow, step_seconds: float, columns: int) -> str:
    letters, blocks = [], iter(row.blocks)
    block = next(blocks, None)
    for column in range(columns):
        moment = (column + 0.5) * step_seconds / columns  # the middle of the slice
        while block is not None and block.end <= moment:
            block = next(blocks, None)
        running = block is not None and block.start <= moment
        letters.append((block.kind.lower() if block.lap else block.kind) if running and block else _IDLE)
    return "".join(letters)


def report_text(
    report: Report | None,
    search: SearchOutcome | None,
    actual: ActualInfo | None,
    timeline: TimelineInfo | None = None,
    *,
    top: int | None = None,
    width: int = TEXT_WIDTH,
) -> str:
    """The applied strategy, the search that chose it, and predicted against actual figures.

    Args:
        report, search, actual, timeline: parts to show; ``None`` for absent ones.
        top: candidates shown at most; ``None`` for all.
        width: characters of a line.
    """
    parts = []
    if report is not None:
        parts.append(str(report))
    if search is not None:
        parts.append(search_text(search, width=width, top=top))
    if timeline is not None:
        parts.append(timeline_text(timeline, width=width))
    if actual is not None:
        parts.append("\n".join(actual_lines(actual)))
    return "\n\n".join(parts) or "nothing was applied and nothing was searched"


def search_text(outcome: SearchOutcome, *, width: int = TEXT_WIDTH, top: int | None = None) -> str:
    """Verdict, candidates and the tables behind them.

    Args:
        width: characters of a line.
        top: candidates shown at most; ``None`` for all. What is left out is counted.
    """
    return "\n".join(_search_parts(outcome, width, top))


def _search_parts(outcome: SearchOutcome, width: int, top: int | None) -> Iterator[str]:
    yield setting_text(outcome.setting)
    yield from (f"  {sentence}" for sentence in verdict(outcome))
    yield from _candidate_parts(candidates_info(outcome), width, top)
    memory, times = memory_info(outcome, limit=top or 12), time_info(outcome, limit=top or 12)
    yield f"\nPeak memory per rank in parts (predicted){_and_measured(memory.bars)}"
    yield as_text(memory_table(memory).without("strategy"), width=width)
    yield f"\nStep time in parts (predicted){_and_measured(times.bars)}"
    yield as_text(time_table(times).without("strategy"), width=width)
    history = history_info(outcome)
    if history.points:
        yield "\nTrials in order"
        yield as_text(history_table(history), width=width)
        yield "\nPredicted against measured"
        table = accuracy_table(accuracy_info(outcome, quantity) for quantity in QUANTITIES)
        yield as_text(table, width=width)
    waterfall = waterfall_info(outcome)
    if waterfall is not None and waterfall.bars:
        yield f"\nFrom the baseline ({waterfall.baseline}) to the winner"
        yield as_text(waterfall_table(waterfall), width=width)
    for title, lines in (("Self-checks", outcome.checks), ("Assumed", outcome.setting.notes)):
        if lines:
            yield f"\n{title}"
            yield from (f"  {line}" for line in lines)


def _candidate_parts(info: CandidatesInfo, width: int, top: int | None) -> Iterator[str]:
    total, usable = count_noun(len(info.lines), "candidate"), len(info.considered)
    yield f"\n{total} listed: {usable} considered, {len(info.pruned)} pruned"
    visible = info.without_twins().first(top)
    yield as_text(candidates_table(visible), width=width)
    numbers = {line.number for line in visible.lines}
    hidden = [line for line in info.lines if line.number not in numbers]
    if hidden:
        # A fate without its mark.
        kinds = Counter(fate_text(line, planned=info.planned).partition(" ")[2] for line in hidden)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        yield f"  and {len(hidden)} more: {counts}"


def _and_measured(bars: tuple[Bar, ...]) -> str:
    return ", and measured" if any(bar.measured is not None for bar in bars) else ""


def actual_lines(info: ActualInfo) -> tuple[str, ...]:
    """Predicted against actual, line by line."""
    lines = ["Predicted and actual", f"  step: {info.actual_seconds.as_seconds()} in training"]
    if info.trial_seconds.value is not None:
        error = change_text(info.trial_error)
        lines.append(f"    the search used {info.trial_seconds.as_seconds()}, off by {error}")
    if info.predicted_seconds is not None:
        lines.append(f"    the estimate alone was off by {change_text(info.time_error)}")
    if info.actual_bytes.value is not None:
        lines.append(f"  peak: {info.actual_bytes.as_bytes()} in training")
        lines.append(f"    the estimate was off by {change_text(info.memory_error)}")
    return tuple(lines)


def fits_text(estimate: Estimate, limit_bytes: int) -> str:
    """States whether an estimate is within the limit, and by how much."""
    if not limit_bytes:
        return "The memory of the device is unknown, and so is whether the strategy fits."
    over = estimate.peak_bytes - limit_bytes
    least, most = estimate.peak_bytes_interval
    within = range_text(estimate.peak_bytes, (least, most), bytes_text)
    peak, limit = bytes_text(estimate.peak_bytes), bytes_text(limit_bytes)
    detail = f"predicted, {within}" if within else "predicted"
    if estimate.allocated_bytes < estimate.peak_bytes:
        tensors, reserve = bytes_text(estimate.allocated_bytes), bytes_text(estimate.reserved_bytes)
        detail = f"{detail}; tensors need {tensors}, for which torch reserves {reserve}"
    summary = f"peak {peak} ({detail}), limit {limit} per rank"
    if over <= 0:
        return f"It {'probably ' if most > limit_bytes else ''}fits: {summary}, {bytes_text(-over)} free."
    if estimate.least_bytes <= limit_bytes:
        return (
            f"It fits only if torch's allocator releases cached memory, which costs time: {summary}, "
            f"{bytes_text(over)} over."
        )
    parts = estimate.memory._asdict()
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"It {'probably ' if least <= limit_bytes else ''}does not fit: {summary}, {bytes_text(over)} over. "
        f"The largest part is {largest}, {bytes_text(parts[largest])}. The peak is in the {estimate.peak_at}."
    )


def estimate_text(estimate: Estimate, limit_bytes: int, *, width: int = TEXT_WIDTH) -> str:
    """Describes whether the estimate fits, its parts, and the collectives of each step."""
    step = ReportedNumber(estimate.step_seconds, "predicted", interval=estimate.step_seconds_interval)
    lines = [
        fits_text(estimate, limit_bytes),
        f"One step takes {step.as_seconds()}.\n",
        as_text(parts_table(estimate), width=width),
    ]
    if estimate.collectives:
        lines.append("\nCommunication of each step, per rank")
        lines.append(as_text(collectives_table(estimate.collectives), width=width))
    return "\n".join(lines)


def estimates_text(before: Estimate, after: Estimate, *, width: int = TEXT_WIDTH) -> str:
    """Two estimates side by side, with their differences."""
    rows = []
    for of, old, new, text in (
        ("memory", before.memory, after.memory, bytes_text),
        ("time", before.time, after.time, seconds_text),
    ):
        parts = zip(old._fields, old, new, strict=True)
        whole = "peak" if of == "memory" else "step"
        for part, first, second in (*parts, (whole, old.total, new.total)):
            if first or second:
                change = change_text(second / first - 1) if first else "new"
                rows.append((of, part, text(first), text(second), change))
    columns = ("of", "part", "before (predicted)", "after (predicted)", "change")
    return as_text(Table(columns, tuple(rows), frozenset({0, 1})), width=width)


def comparisons_text(comparisons: Iterable[Comparison], *, width: int = TEXT_WIDTH) -> str:
    """Measured speeds of a cluster beside the table's."""
    return as_text(comparisons_table(comparisons), width=width)


def operators_text(info: OperatorsInfo, *, width: int = TEXT_WIDTH) -> str:
    """The operators as plain text."""
    return as_text(operators_table(info), width=width)
