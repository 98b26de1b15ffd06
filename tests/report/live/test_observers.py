"""What is shown while a search runs."""

from __future__ import annotations

import io
import threading
import time

import pytest

from atorch_ns.report import LineLog, LiveTable, SearchView, observer_for
from atorch_ns.search import (
    Ended,
    Event,
    Priced,
    Profiling,
    SearchNote,
    StopRule,
    TrialEnded,
    TrialOutcome,
    TrialStarted,
    TrialTask,
)
from tests.report.outcomes import SETTING, searched


def _task(kind: str = "trial") -> TrialTask:
    return TrialTask(id=1, key="k", steps=(), rule=StopRule(), kind=kind)  # type: ignore[arg-type]


def _events() -> list[Event]:
    outcome = searched()
    win, _, base, _, boom, _ = outcome.rows
    assert base.trial is not None
    assert boom.trial is not None
    assert win.trial is not None
    return [
        Profiling("TinyLlama"),
        Priced(SETTING, tuple(row.candidate for row in outcome.rows)),
        TrialStarted(1, base.candidate, _task()),
        TrialEnded(1, base.candidate, base.trial, "base"),
        SearchNote("resumed 2 trials"),
        TrialStarted(2, boom.candidate, _task()),
        TrialEnded(2, boom.candidate, boom.trial, "base"),
        TrialStarted(3, win.candidate, _task()),
        TrialEnded(3, win.candidate, win.trial, "win"),
        TrialStarted(4, win.candidate, _task("probe")),
        TrialEnded(4, win.candidate, TrialOutcome(status="ok"), "win"),
        Ended(outcome),
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_for_each_event() -> None:
    stream = io.StringIO()
    log = LineLog(stream)
    for event in _events():
        log(event)
    lines = stream.getvalue().splitlines()
    text = "\n".join(lines)
    assert "profiling TinyLlama" in lines[0]
    assert "6 candidates, 1 pruned" in text
    assert "ddp (baseline): predicted 30.0 ms, 800 MiB" in text
    assert "trial 1: ddp: 40.0 ms ±0.3 ms (measured, n=5), peak 800 MiB; best so far" in text
    assert "raised on rank 1: ValueError: no <bf16> & friends (log: /logs/4.txt); best so far: ddp" in text
    assert "checking the numerics of fsdp" in text
    assert "numerics of fsdp → amp_native {'dtype': 'bf16'}: match one process" in text
    assert "Chosen: fsdp" in text
    assert "lost: ddp: 60% slower (measured 40.0 ms against 25.0 ms)" in text
    assert all(line.startswith("[") for line in lines)


def test_verbose_tells_of_the_pruned() -> None:
    quiet, loud = io.StringIO(), io.StringIO()
    for stream, verbose in ((quiet, False), (loud, True)):
        with LineLog(stream, verbose=verbose) as log:
            for event in _events():
                log(event)
    assert "pruned: zero1" in loud.getvalue()
    assert "pruned: zero1" not in quiet.getvalue()


def test_silence_is_broken() -> None:
    stream = io.StringIO()
    with LineLog(stream, every_s=0.05) as log:
        log(Profiling("TinyLlama"))
        deadline = time.monotonic() + 5
        while "still running after" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "still running after 0 s: profiling TinyLlama" in stream.getvalue()


def test_nothing_is_written_after_the_end() -> None:
    stream = io.StringIO()
    log = LineLog(stream, every_s=0.02)
    log(Profiling("TinyLlama"))
    log(Ended(searched()))
    written = stream.getvalue()
    log(SearchNote("late"))
    time.sleep(0.1)
    assert stream.getvalue() == written
    assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name]


def test_the_live_table_ends_with_everything_in_it() -> None:
    stream = _Terminal()
    table = LiveTable(stream, width=150)
    for event in _events():
        table(event)
    last = stream.getvalue()
    for words in (
        "ddp (baseline)",
        "✓ won",
        "✗ raised",
        "○ pruned (memory)",
        "25.0 ms ±0.2 ms",
        "Chosen: fsdp",
    ):
        assert words in last
    assert "resumed 2 trials" in last


def test_the_live_table_keeps_a_candidate_s_time_through_its_probe() -> None:
    stream = _Terminal()
    with LiveTable(stream, width=150) as table:
        for event in _events()[:-1]:
            table(event)
        assert table._progress.trials["win"].median_seconds == pytest.approx(0.025)


def test_the_live_table_shows_the_baseline_however_many_there_are() -> None:
    outcome = searched()
    stream = _Terminal()
    with LiveTable(stream, width=150) as table:
        table._num_rows = 2
        table(Priced(SETTING, tuple(row.candidate for row in outcome.rows)))
        table(Ended(outcome))
    assert "ddp (baseline)" in stream.getvalue()
    assert "4 more not shown, 1 pruned by the estimate" in stream.getvalue()


def test_the_view_suits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(observer_for(_Terminal()), LiveTable)
    assert isinstance(observer_for(io.StringIO()), LineLog)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(observer_for(_Terminal()), LineLog)
    closed = io.StringIO()
    closed.close()
    assert isinstance(observer_for(closed), LineLog)


class _Broken(_Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("make", [LineLog, LiveTable])
def test_a_stream_that_breaks_does_not_end_the_search(make: type[LineLog] | type[LiveTable]) -> None:
    view: SearchView = make(_Broken())
    for event in _events():
        view(event)
    view.close()
    view.close()


def test_it_ends_its_threads_when_the_search_raises() -> None:
    def search(stream: io.StringIO) -> None:
        with observer_for(stream) as view:
            view(Profiling("TinyLlama"))
            raise RuntimeError("the search failed")

    for stream in (io.StringIO(), _Terminal()):
        with pytest.raises(RuntimeError, match="the search failed"):
            search(stream)
