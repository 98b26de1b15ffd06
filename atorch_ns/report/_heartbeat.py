"""Heartbeat: silence reads as a hang, so something is said every few seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Heartbeat"]

_LOGGER = logging.getLogger(__name__)


class Heartbeat:
    """Calls ``beat`` whenever nothing has been heard for a while.

    One daemon thread, which runs from :meth:`touch` to :meth:`stop`.

    Args:
        beat: what to call; what it raises ends the heartbeat.
        every_s: seconds of silence before each call.
    """

    def __init__(self, beat: Callable[[], None], *, every_s: float = 10.0) -> None:
        self._beat = beat
        self._every_s = every_s
        self._touched = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def touch(self) -> None:
        """Something was said; begins the wait anew. Starts the thread if it does not run."""
        self._touched.set()
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="atorch-ns heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; may be called twice."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        self._touched.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._touched.clear()
            if self._touched.wait(self._every_s):
                continue
            try:
                self._beat()
            except Exception:  # the user's observer: a heartbeat must not end the job
                _LOGGER.warning("the heartbeat fails and ends", exc_info=True)
                return
