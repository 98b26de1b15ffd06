"""Events of a search: their JSON, the queue of a coordinator, and the stream of a rank elsewhere."""

from __future__ import annotations

import logging

import pytest

from atorch_ns.engine.coordinator.events import EventQueue, EventStream, event_from_json, event_to_json
from atorch_ns.errors import InputError
from atorch_ns.search import Event, Profiling, SearchNote, TrialEnded, TrialOutcome, TrialStarted
from tests.engine.fake_search import FakeSearch


@pytest.mark.parametrize("event", [SearchNote("a rank is late"), Profiling("Tiny"), TrialEnded(
    number=2, candidate=FakeSearch().candidates[0], outcome=TrialOutcome(status="ok", step_seconds=(0.1,)), best="a"
)])  # fmt: skip
def test_an_event_travels_as_json(event: Event) -> None:
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"kind": "Unknown", "event": {}}', b'{"kind": "Note", "event": {}}']
)
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="this is no"):
        event_from_json(data)


def test_a_queue_numbers_trials_and_keeps_all_events() -> None:
    seen: list[Event] = []
    search = FakeSearch([str(number) for number in range(12)])
    queue = EventQueue(search.candidates[:1], seen.append)
    while (task := search.ask()) is not None:
        queue.put_start(task)
        queue.put_end(task, TrialOutcome(status="ok"), best=None)
    assert seen == [], "nothing is delivered before a thread has time"
    queue.deliver()
    assert [event.number for event in seen if isinstance(event, TrialStarted)] == list(range(1, 13))
    assert queue.after(0) + queue.after(20) == seen
    assert queue.after(-3) == queue.after(0)
    assert queue.after(99) == []
    first, second = (event.candidate for event in seen if isinstance(event, TrialEnded) and event.number < 3)
    assert first is search.candidates[0]
    assert (second.key, second.label) == ("1", "1"), "one that the search did not name in advance"


def test_an_observer_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Event) -> None:
        raise RuntimeError("terminal gone")

    queue = EventQueue([], broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            queue.put(SearchNote("x"))
        queue.deliver()
    assert caplog.text.count("the observer of the search failed") == 1
    assert len(queue.after(0)) == 3


def test_a_stream_delivers_each_event_once_and_begins_anew_after_a_restart() -> None:
    seen: list[Event] = []
    stream = EventStream(seen.append)
    data = [event_to_json(SearchNote(text)) for text in ("a", "b", "c")]
    assert stream.take(data[:2], 0) == 2
    assert stream.take(data, 0) == 1, "an answer that came twice"
    stream.note(SearchNote("own"))
    assert (stream.take([b"garbage"], 3), stream.num_events) == (1, 4)
    stream.start_again()
    assert stream.take(data[:1], 0) == 1
    assert seen == [SearchNote(text) for text in ("a", "b", "c", "own", "a")]
