"""The benchmark of the watch times functions that are there, each once where they call one another."""

from __future__ import annotations

from benchmarks import watch


def test_the_functions_of_the_watch_are_timed_and_put_back() -> None:
    before = [getattr(kind, name) for kind, names in watch._WATCHED.items() for name in names]
    with watch._time_watch() as clock:
        inner = clock.around(lambda: sum(range(1000)))
        clock.around(inner)()
        assert clock.seconds > 0
    assert [getattr(kind, name) for kind, names in watch._WATCHED.items() for name in names] == before
