"""Watch of a script: what looks at the jobs that front ends make in it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, Protocol

from atorch_ns.job.result import Result


class Watch(Protocol):
    """What front ends meet in a script that is watched.

    Attributes:
        strategy: in the place of each ``load_strategy``; ``None`` leaves the script's own.
    """

    strategy: Any

    def follow(self, result: Result) -> None:
        """Called on every rank with each job that has an optimizer, once it has one."""


WATCH: Final[ContextVar[Watch | None]] = ContextVar("watch", default=None)
"""The watch of the script that runs in this context; ``None`` for almost all."""
