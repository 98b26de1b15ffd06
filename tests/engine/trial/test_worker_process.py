"""Messages over pipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from atorch_ns.engine.trial.worker_process import Receiver, send


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        try:
            os.close(fd)
        except OSError:
            continue


def test_messages_come_in_order(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    receiver = Receiver(reading)
    assert receiver.receive(0.0) is None
    for number in range(3):
        send(writing, {"number": number})
    assert [receiver.receive(0.0) for _ in range(4)] == [{"number": 0}, {"number": 1}, {"number": 2}, None]
    assert not receiver.closed


def test_one_larger_than_the_pipe(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    message = {"text": "é" * 500_000}
    writer = threading.Thread(target=send, args=(writing, message))
    writer.start()
    assert Receiver(reading).receive(10.0) == message
    writer.join()


def test_what_was_sent_before_the_end_arrives(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    send(writing, {"last": True})
    os.write(writing, b"\0\0")  # the beginning of a message that never comes
    os.close(writing)
    receiver = Receiver(reading)
    assert receiver.receive(None) == {"last": True}
    assert receiver.receive(None) is None
    assert receiver.closed


def test_nobody_listens(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        send(writing, {})
