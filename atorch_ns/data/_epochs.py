"""Which epoch the next iteration of a loader belongs to."""

from __future__ import annotations

from typing import Any, final

from atorch_ns.data._samplers import readable_epoch

__all__ = ["EpochClock"]


@final
class EpochClock:
    """The epoch of the next iteration, kept where the user can set it too.

    Where the sampler (or the iterable dataset) shows its ``epoch``, that is the truth: a call of its
    ``set_epoch`` by the user counts as much as one of the loader's. Where it has ``set_epoch`` but no
    ``epoch`` to read, it hears only of the epochs that the user names to the loader, since to set one
    unasked could undo what the user has set. Without a source the clock counts by itself.

    Args:
        source: the object with ``set_epoch``, or None.
    """

    def __init__(self, source: Any | None) -> None:
        self._source = source
        self._count = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        shown = readable_epoch(self._source)
        return self._count if shown is None else shown

    def set(self, epoch: int) -> None:
        """The user names the epoch of the next iteration."""
        self._count = epoch
        if self._source is not None:
            self._source.set_epoch(epoch)

    def begin(self) -> int:
        """The epoch of the iteration that begins now."""
        epoch = self.epoch
        if readable_epoch(self._source) is not None:
            self.set(epoch)  # workers that live on hear what the user told the object in this process
        return epoch

    def end(self, epoch: int) -> None:
        """The iteration of ``epoch`` is over: the next epoch comes, unless the user has set another since."""
        if self.epoch != epoch:
            return
        self._count = epoch + 1
        if readable_epoch(self._source) is not None:
            self.set(epoch + 1)
