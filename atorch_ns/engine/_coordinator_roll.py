"""Which ranks of a job are here, and when each was last heard of."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from atorch_ns.errors import CoordinatorError

__all__ = ["Roll", "since"]


@dataclass(kw_only=True)
class _Member:
    session: str
    last_seen: float
    gone: bool = False


class Roll:
    """The ranks of one job. Not thread-safe; times are those of the coordinator's clock, in seconds."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.last_task_id = 0
        self._members: dict[int, _Member] = {}

    def join(self, rank: int, session: str, last_task_id: int, now: float) -> None:
        """Enters a rank; the same session may enter again.

        Raises:
            CoordinatorError: no such rank, or another process has this rank already.
        """
        if not 0 <= rank < self.world_size:
            raise CoordinatorError(f"rank {rank} is not one of the job's {self.world_size} ranks")
        member = self._members.get(rank)
        if member is not None and member.session != session:
            raise CoordinatorError(
                f"rank {rank} has joined already, from another process. Two processes have the same rank, or "
                "one was started again: end all ranks and start the job anew."
            )
        if member is None:
            self._members[rank] = _Member(session=session, last_seen=now)
        member = self._members[rank]
        member.last_seen, member.gone = now, False
        self.last_task_id = max(self.last_task_id, last_task_id)

    def has(self, rank: int) -> bool:
        """Whether a rank has joined."""
        return rank in self._members

    def seen(self, rank: int, now: float) -> None:
        """Takes note that a rank lives."""
        self._members[rank].last_seen = now

    def leave(self, rank: int) -> None:
        """Takes note of a goodbye."""
        self._members[rank].gone = True

    def forgive(self, now: float) -> None:
        """Counts silence from now on: the coordinator itself could not listen before."""
        for member in self._members.values():
            member.last_seen = now

    @property
    def absent(self) -> list[int]:
        """The ranks that never joined."""
        return [rank for rank in range(self.world_size) if rank not in self._members]

    @property
    def present(self) -> list[int]:
        """The ranks that joined and did not say goodbye."""
        return [rank for rank, member in self._members.items() if not member.gone]

    def silent(self, now: float) -> dict[int, float]:
        """The present ranks that were not heard of for longer than the time-out, with the seconds."""
        silence = {rank: now - self._members[rank].last_seen for rank in self.present}
        return {rank: seconds for rank, seconds in silence.items() if seconds > self.timeout_s}


def since(seconds: float) -> str:
    """A time ago, as a time of day."""
    return (datetime.now() - timedelta(seconds=seconds)).strftime("%H:%M:%S")
