"""What a coordinator needs of a search, and what it answers to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from atorch_ns.errors import AtorchError
from atorch_ns.search import SearchOutcome, TrialOutcome, TrialTask

__all__ = ["Heartbeat", "Joined", "NotJoinedError", "Over", "SearchLike"]


class SearchLike(Protocol):
    """What a coordinator needs of a search. Called by one thread at a time."""

    @property
    def best(self) -> str | None:
        """Key of the best so far."""

    def ask(self) -> TrialTask | None:
        """The next trial; ``None`` when the search is over."""

    def tell(self, task_id: int, outcome: TrialOutcome) -> None:
        """What came of a trial."""

    def outcome(self) -> SearchOutcome:
        """Everything found so far."""

    def cancel(self, reason: str) -> None:
        """Ends the search: ``ask`` gives ``None`` from now on."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Answer to a rank that joins.

    Attributes:
        incarnation: of the coordinator; another one after a restart.
        world_size: ranks that take part.
        heartbeat_s: seconds between two heartbeats.
    """

    incarnation: str
    world_size: int
    heartbeat_s: float


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Answer to a heartbeat.

    Attributes:
        cancel: the tasks that the rank is to end.
        over: whether the search is over.
    """

    cancel: tuple[int, ...] = ()
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Over:
    """The end of a search, the same for all ranks.

    Attributes:
        outcome: what was found; ``None`` if the search failed.
        error: why it failed; empty if it did not.
        failures: reason by rank.
    """

    outcome: SearchOutcome | None = None
    error: str = ""
    failures: Mapping[int, str] = field(default_factory=dict)


class NotJoinedError(AtorchError):
    """A call by a rank that this coordinator does not know: it was restarted, or the rank never joined."""
