"""Failures of a pipeline step: what ranks read of each other, and what they leave of the store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from atorch_ns.errors import RankError
from atorch_ns.pipeline.run import failure
from atorch_ns.pipeline.run.failure import FailureNotes


@pytest.mark.parametrize("note", ["failed:rank 1 (stage 1) failed", None])
def test_reading_notes_leaves_the_timeout_of_the_shared_store(
    note: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_PATIENCE_S", 0.1)
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=77))
    notes = object.__new__(FailureNotes)  # without process groups
    notes._ranks, notes._rank, notes._store = (0, 1), 0, dist.PrefixStore("notes", shared)
    if note is not None:
        notes._store.set("1", note)
    with pytest.raises(RankError, match="failed" if note else "no longer answer"):
        notes.raise_lost(RuntimeError("Connection reset"))
    assert shared.timeout == timedelta(seconds=77)
