"""Failures of a pipeline step: reported to the other ranks, and raised on each with the reason."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from atorch_ns.errors import AtorchError, RankError, StepError
from atorch_ns.text import error_text

_PATIENCE_S = 2.0
"""The time for which ranks that have lost a connection wait for the others' notes."""


class FailureNotes:
    """Notes that the ranks of a pipeline leave for each other in the store of the process groups.

    Where the launcher keeps the store, it outlives the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        name = f"pipeline_failures/{group.group_name}"
        store = group.get_group_store()
        self._store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # not in torch's __all__

    def note_own(self, error: BaseException, stages: Sequence[int]) -> None:
        """Notes that this rank failed."""
        self._write_note(f"failed:{self._describe_failure(error, stages)}")

    def note_lost(self) -> None:
        """Notes that this rank runs but cannot reach another rank."""
        self._write_note("lost:")

    def raise_own(self, error: BaseException, stages: Sequence[int]) -> NoReturn:
        """Raises this rank's failure, with its stages.

        Raises:
            StepError: from ``error``.
        """
        if isinstance(error, AtorchError):  # it names the cause itself
            raise error
        text = f"{self._describe_failure(error, stages)}. The other ranks of the pipeline stop too."
        raise StepError(text) from error

    def _describe_failure(self, error: BaseException, stages: Sequence[int]) -> str:
        where = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        return f"rank {self._rank} ({where}) failed: {error_text(error)}"

    def raise_lost(self, error: BaseException) -> NoReturn:
        """Raises the other ranks' failure, after a connection to them was lost.

        Raises:
            RankError: from ``error``, naming the ranks that failed or do not answer.
        """
        others = [rank for rank in self._ranks if rank != self._rank]
        notes = self._read_notes(others)
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
                f"out of memory, or held up elsewhere; their own logs say more. Seen here as: {error_text(error)}",
                failures=reasons,
            ) from error
        raise RankError(
            f"the ranks {', '.join(map(str, self._ranks))} of the pipeline lost connection to each other, though all "
            f"still run: {error_text(error)}"
        ) from error

    def _write_note(self, note: str) -> None:
        try:
            self._store.set(str(self._rank), note)
        except RuntimeError:  # the store is gone with the rank that kept it
            return

    def _read_notes(self, ranks: Sequence[int]) -> dict[int, str]:
        notes: dict[int, str] = {}
        until = time.monotonic() + _PATIENCE_S
        usual_timeout = self._store.timeout  # type: ignore[attr-defined]  # stubs lack it
        try:
            self._store.set_timeout(timedelta(seconds=_PATIENCE_S))  # the default is minutes
            while time.monotonic() < until and len(notes) < len(ranks):
                for rank in ranks:
                    if rank not in notes and self._store.check([str(rank)]):
                        notes[rank] = self._store.get(str(rank)).decode()
                if any(note.startswith("failed:") for note in notes.values()):
                    break  # the cause is known
                time.sleep(0.05)
        except RuntimeError:  # the store is gone
            pass
        finally:  # other users share it
            self._store.set_timeout(usual_timeout)
        return notes


def tear_down(groups: list[dist.ProcessGroup], error: BaseException, release: Callable[[], None]) -> None:
    """Closes this rank's connections of groups, so that operations that wait for it fail at once.

    Gloo closes them when nothing refers to a group any more, so frames of ``error`` are cleared.

    Args:
        groups: the groups, used for nothing else; empty afterwards.
        error: the error, whose frames may refer to the groups.
        release: drops all other references.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    release()
    while groups:
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # a broken group may refuse
            dist.destroy_process_group(groups.pop())
    gc.collect()  # a group in a reference cycle stays open
