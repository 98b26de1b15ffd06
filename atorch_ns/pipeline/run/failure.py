"""Failures of a pipeline step: reported to the other ranks, and raised on each with the reason."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from atorch_ns.errors import AtorchError, RankError, StepError

_PATIENCE_S = 2.0
"""How long ranks that have lost a connection wait for the others' notes."""


class FailureNotes:
    """Notes that the ranks of a pipeline leave for each other in the store of the process groups.

    Where the launcher keeps the store, it outlives the ranks.

    Args:
        group: the ranks of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        name = f"pipeline_failures/{group.group_name}"
        store = group.get_group_store()
        self._store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # torch leaves it out of __all__

    def note_own(self, error: BaseException, stages: Sequence[int]) -> None:
        """Notes that this rank failed."""
        self._write(f"failed:rank {self._rank} ({_stages(stages)}) failed: {_described(error)}")

    def note_lost(self) -> None:
        """Notes that this rank runs, but cannot reach another."""
        self._write("lost:")

    def raise_own(self, error: BaseException, stages: Sequence[int]) -> NoReturn:
        """Raises this rank's failure, with its stages.

        Raises:
            StepError: from ``error``.
        """
        text = f"rank {self._rank} ({_stages(stages)}) failed: {_described(error)}"
        if isinstance(error, AtorchError):
            raise error
        raise StepError(f"{text}. The other ranks of the pipeline stop too.") from error

    def raise_lost(self, error: BaseException) -> NoReturn:
        """Raises the other ranks' failure, after a connection to them was lost.

        Raises:
            RankError: from ``error``, naming the ranks that failed or do not answer.
        """
        others = [rank for rank in self._ranks if rank != self._rank]
        notes = self._read(others)
        failures = {
            rank: note.removeprefix("failed:") for rank, note in notes.items() if note.startswith("failed:")
        }
        if failures:
            raise RankError("; ".join(failures.values()), failures=failures) from error
        silent = [rank for rank in others if rank not in notes]
        if silent:
            reasons = dict.fromkeys(silent, "does not answer")
            who = ", ".join(map(str, silent))
            raise RankError(
                f"rank(s) {who} of the pipeline (ranks {', '.join(map(str, self._ranks))}) no longer answer: killed, "
                f"out of memory, or held up elsewhere; their own logs say more. Seen here as: {_described(error)}",
                failures=reasons,
            ) from error
        raise RankError(
            f"the ranks {', '.join(map(str, self._ranks))} of the pipeline lost connection to each other, though all "
            f"still run: {_described(error)}"
        ) from error

    def _write(self, note: str) -> None:
        try:
            self._store.set(str(self._rank), note)
        except RuntimeError:  # the store is gone with the rank that kept it
            return

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        """The notes of ``ranks``; those present when one failed or the time is over."""
        notes: dict[int, str] = {}
        until = time.monotonic() + _PATIENCE_S
        try:
            self._store.set_timeout(timedelta(seconds=_PATIENCE_S))
            while time.monotonic() < until and len(notes) < len(ranks):
                for rank in ranks:
                    if rank not in notes and self._store.check([str(rank)]):
                        notes[rank] = self._store.get(str(rank)).decode()
                if any(note.startswith("failed:") for note in notes.values()):
                    break
                time.sleep(0.05)
        except RuntimeError:  # the store is gone
            pass
        return notes


def tear_down(group: dist.ProcessGroup, error: BaseException, release: Callable[[], None]) -> None:
    """Closes this rank's connections of ``group``, so that operations that wait for it fail at once.

    Gloo closes them when nothing refers to the group any more, so frames of ``error`` are cleared.

    Args:
        group: the group; used for nothing else.
        error: the error, whose frames may refer to the group.
        release: drops all other references.
    """
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    release()
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError, AssertionError):
        return
    del group
    gc.collect()


def original(error: BaseException) -> BaseException:
    """The error inside those that torch's schedules wrap around it."""
    while isinstance(error, RuntimeError) and "[Stage" in str(error) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _described(error: BaseException) -> str:
    text: Any = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
