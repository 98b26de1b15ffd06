"""Views of a running search: a live table on a terminal, otherwise a log of lines."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO, cast

from atorch_ns.report.info.verdict import verdict
from atorch_ns.report.live.progress import Progress, event_lines, live_view
from atorch_ns.search import Ended, Event
from atorch_ns.text import error_text

if TYPE_CHECKING:
    from rich.live import Live


log = logging.getLogger("atorch_ns")


class SearchView(ABC):
    """An observer that shows a search on a stream. It never raises and never waits for the stream's reader.

    Close it, or use it as a context manager; the end of the search closes it too.

    Args:
        stream: the stream to write to.
        verbose: shows more candidates.
        time_limit_s: time limit of the search.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        verbose: bool = False,
        time_limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = SafeStream(stream)
        self._verbose = verbose
        self._progress = Progress(clock=clock, time_limit_s=time_limit_s)
        self._is_closed = False

    def __call__(self, event: Event) -> None:
        """Shows an event; whatever goes wrong ends the showing, not the search."""
        try:
            if not self._is_closed:
                self._show(event)
        except Exception as error:
            log.debug("the search is no longer shown: %s", error_text(error))
            self.close()

    def __enter__(self) -> SearchView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Ends its thread; may be called twice. The stream stays open."""

    @abstractmethod
    def _show(self, event: Event) -> None: ...


class LineLog(SearchView):
    """Log with one plain line per event, and one whenever nothing has happened for ten seconds.

    Args:
        stream, verbose, time_limit_s, clock: as in :class:`SearchView`; ``verbose`` also shows pruned ones.
        every_s: longest silence.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        verbose: bool = False,
        time_limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 10.0,
    ) -> None:
        super().__init__(stream, verbose=verbose, time_limit_s=time_limit_s, clock=clock)
        self._lock = threading.Lock()  # events and heartbeats come from two threads
        self._heartbeat = HeartbeatObserver(self._write_heartbeat, every_s=every_s)

    def close(self) -> None:
        """Stops the heartbeat; no line is written afterwards."""
        self._is_closed = True
        self._heartbeat.stop()

    def _show(self, event: Event) -> None:
        with self._lock:
            self._progress.note(event)
            for line in event_lines(event, self._progress, verbose=self._verbose):
                self._write_line(line)
        if isinstance(event, Ended):
            self.close()
        else:
            self._heartbeat.touch()

    def _write_heartbeat(self) -> None:
        with self._lock:
            progress = self._progress
            self._write_line(f"still running after {progress.doing_for_s:.0f} s: {progress.doing}")

    def _write_line(self, line: str) -> None:
        self._stream.write(f"[{self._progress.elapsed_s:6.1f} s] {line}\n")
        self._stream.flush()


class LiveTable(SearchView):
    """One table that is drawn anew several times a second, and the verdict under it at the end.

    Args:
        stream, verbose, time_limit_s, clock: arguments of :class:`SearchView`; the stream is a terminal.
        width: columns; ``None`` for the terminal's own.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        verbose: bool = False,
        time_limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        from rich.console import Console

        super().__init__(stream, verbose=verbose, time_limit_s=time_limit_s, clock=clock)
        self._console = Console(file=cast("TextIO", self._stream), width=width, highlight=False)
        self._num_rows = 24 if self._verbose else 12
        self._live: Live | None = None

    def close(self) -> None:
        """Stops the live table, and writes its last state."""
        self._is_closed = True
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _show(self, event: Event) -> None:
        self._progress.note(event)
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                get_renderable=lambda: live_view(self._progress, self._num_rows, width=self._console.width),
                console=self._console,
                refresh_per_second=4,
                # The user's own output goes where it always went.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.refresh()
        if isinstance(event, Ended):
            self.close()
            for sentence in verdict(event.outcome):
                self._console.print(sentence, markup=False)  # names may hold brackets


def observer_for(
    stream: TextIO | None = None, *, verbose: bool = False, time_limit_s: float | None = None
) -> SearchView:
    """The view that suits a stream: :class:`LiveTable` on a terminal, otherwise :class:`LineLog`.

    Args:
        stream: ``None`` for standard error, so that standard output stays the program's own.
        verbose, time_limit_s: as in :class:`SearchView`.
    """
    stream = sys.stderr if stream is None else stream
    if SafeStream(stream).isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return LiveTable(stream, verbose=verbose, time_limit_s=time_limit_s)
    return LineLog(stream, verbose=verbose, time_limit_s=time_limit_s)


class SafeStream:
    """Writes to a stream until that fails once (closed, full disk, a reader that has gone), then to nowhere.

    It has the methods that rich needs of a file.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_failed = False

    @property
    def encoding(self) -> str:
        """Encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        try:
            return not self._has_failed and self._stream.isatty()
        except (AttributeError, ValueError):  # no file, or a closed one
            return False

    def fileno(self) -> int:
        """File descriptor of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes, or drops the text."""
        self._try_action(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes, if there is still something to flush to."""
        self._try_action(self._stream.flush)

    def _try_action(self, action: Callable[[], object]) -> None:
        if not self._has_failed:
            try:
                action()
            except (OSError, ValueError) as error:
                self._has_failed = True
                log.debug("the search is no longer shown: %s", error_text(error))


class HeartbeatObserver:
    """Calls ``beat`` whenever nothing has been heard for a while.

    One daemon thread, which runs from :meth:`touch` to :meth:`stop`.

    Args:
        beat: function to call; an exception in it ends the heartbeat.
        every_s: seconds of silence before each call.
    """

    def __init__(self, beat: Callable[[], None], *, every_s: float = 10.0) -> None:
        self._beat = beat
        self._every_s = every_s
        self._touch_event = threading.Event()
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def touch(self) -> None:
        """Restarts the wait, and starts the thread if it does not run."""
        self._touch_event.set()
        if self._thread is None:
            self._stop_event.clear()
            self._thread = threading.Thread(target=self._run, name="atorch-ns heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; may be called twice."""
        thread, self._thread = self._thread, None
        self._stop_event.set()
        self._touch_event.set()
        if thread is not None and thread is not threading.current_thread():  # beat() may call stop()
            thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop_event.is_set():
            self._touch_event.clear()
            if self._touch_event.wait(self._every_s):
                continue
            try:
                self._beat()
            except Exception:  # the user's observer: a heartbeat must not end the job
                log.warning("the heartbeat failed and stops", exc_info=True)
                return
