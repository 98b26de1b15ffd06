"""Whatever stops a save, the checkpoint before it stays the latest, whole and loadable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from atorch_ns import checkpoint
from atorch_ns.checkpoint import folder as folder_module
from atorch_ns.errors import CheckpointError, RankError
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import snapshot
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.checkpoint.jobs import batches, make, step

MLP = {"case": get_case("mlp"), "optim_param_func": None}


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


def before_writing(action: Callable[[], None]) -> Any:
    """The writer's ``write_data``, with ``action`` when one file has been written."""
    write = FileSystemWriter.write_data

    def changed(self: FileSystemWriter, *arguments: Any) -> Any:
        written = write(self, *arguments)
        action()
        return written

    return changed


def save_twice(folder: Path, action: Callable[[], None], only: int) -> None:
    """A good save, a step, and a save that ``action`` disturbs on rank ``only``; then it goes on, if it can."""
    result = make("fsdp", **MLP)
    data = batches(result)
    step(result, next(data))
    checkpoint.save(folder, result)
    step(result, next(data))
    if dist.get_rank() == only:
        FileSystemWriter.write_data = before_writing(action)  # type: ignore[method-assign]
    checkpoint.save(folder, result)


def load_and_save(folder: Path) -> tuple[int, int]:
    result = make("zero1", **MLP)
    at = checkpoint.load(folder, result)["step"]
    for batch in batches(result):
        step(result, batch)
    checkpoint.save(folder, result)
    return at, result.train_step.num_steps


def die() -> None:
    os._exit(9)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed(tmp_path: Path, rank: int) -> None:
    dead, other = (rank, 1 - rank)
    outcomes = catch_ranks(save_twice, 2, args=(tmp_path, die, rank), timeout_s=30)
    assert outcomes[dead].status == "died"
    assert outcomes[other].error_type == "CheckpointError"
    assert "was not written" in outcomes[other].message
    assert outcomes[other].seconds < 25
    assert names(tmp_path)[0].startswith(".tmp-step-2-")
    assert names(tmp_path)[1:] == ["latest", "step-1"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    if rank == 1:
        assert run_ranks(load_and_save, 2, args=(tmp_path,)) == [(1, 6)] * 2
        assert names(tmp_path) == ["latest", "step-1", "step-6"]


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_a_writer_fails(tmp_path: Path) -> None:
    outcomes = catch_ranks(save_twice, 2, args=(tmp_path, fail, 1), timeout_s=30)
    for outcome in outcomes:
        assert isinstance(outcome.error, CheckpointError)
        assert "rank 1: OSError: [Errno 28] No space left on device" in outcome.message
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"


def test_the_last_moment_fails(tmp_path: Path) -> None:
    def work() -> list[str]:
        result = make("ddp", **MLP)
        data = batches(result)
        said, commit = [], folder_module.commit

        def broken(*_: Any) -> Path:
            raise OSError(5, "Input/output error")

        for number in range(3):
            step(result, next(data))
            vars(folder_module)["commit"] = broken if number == 1 else commit
            try:
                checkpoint.save(tmp_path, result)
            except (CheckpointError, RankError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    first, second = run_ranks(work, 2)
    assert len(first) == len(second) == 1
    assert first[0].startswith("CheckpointError: cannot complete the checkpoint in")
    assert second[0].startswith("RankError: completing the checkpoint failed on 1 other rank(s)")
    assert names(tmp_path) == ["latest", "step-1", "step-3"]


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(path: Path, blind: int) -> None:
        result = make("ddp", **MLP)
        if dist.get_rank() == blind:
            Path.is_dir = lambda self: False  # type: ignore[method-assign]
        checkpoint.save(path, result)

    refused = catch_ranks(work, 2, args=(tmp_path / "file", -1), timeout_s=30)
    assert [outcome.error_type for outcome in refused] == ["CheckpointError", "RankError"]
    assert "cannot write checkpoints to" in refused[0].message
    unseen = catch_ranks(work, 2, args=(tmp_path, 1), timeout_s=30)
    assert [outcome.error_type for outcome in unseen] == ["RankError", "CheckpointError"]
    assert "but rank 1 cannot see it. Save to a folder that all ranks share" in unseen[1].message


class TestInTheBackground:
    def test_training_does_not_change_what_is_being_written(self, tmp_path: Path) -> None:
        def work() -> tuple[bool, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            result = make("fsdp", **MLP)
            data = batches(result)
            step(result, next(data))
            kept = snapshot(result.model)
            FileSystemWriter.write_data = slowly  # type: ignore[method-assign, assignment]
            pending = checkpoint.save(tmp_path, result, asynchronous=True)
            assert pending is not None
            early = pending.done
            step(result, next(data))
            assert pending.wait() == tmp_path / "step-1"
            assert pending.done
            fresh = make("fsdp", **MLP)
            checkpoint.load(tmp_path, fresh)
            return early, kept, snapshot(fresh.model)

        write = FileSystemWriter.write_data

        def slowly(self: FileSystemWriter, *arguments: Any) -> Any:
            time.sleep(0.5)
            return write(self, *arguments)

        for early, kept, loaded in run_ranks(work, 2):
            assert not early
            assert [name for name in kept if not torch.equal(kept[name], loaded[name])] == []

    def test_the_next_save_waits(self, tmp_path: Path) -> None:
        def work() -> list[bool]:
            result = make("ddp", **MLP)
            data = batches(result)
            pendings = []
            for _ in range(3):
                step(result, next(data))
                pendings.append(checkpoint.save(tmp_path, result, asynchronous=True))
            done = [pending.done for pending in pendings[:2] if pending is not None]
            step(result, next(data))
            checkpoint.save(tmp_path, result)
            return done

        assert run_ranks(work, 2) == [[True, True]] * 2
        assert names(tmp_path) == ["latest", "step-1", "step-2", "step-3", "step-4"]
        assert checkpoint.latest(tmp_path) == tmp_path / "step-4"

    @pytest.mark.parametrize("waits", [True, False])
    def test_an_error_is_raised_once_where_somebody_waits(self, tmp_path: Path, waits: bool) -> None:
        def work() -> list[str]:
            result = make("fsdp", **MLP)
            data = batches(result)
            step(result, next(data))
            write, said = FileSystemWriter.write_data, []
            FileSystemWriter.write_data = before_writing(fail)  # type: ignore[method-assign]
            pending = checkpoint.save(tmp_path, result, asynchronous=True)
            assert pending is not None
            try:
                if waits:
                    pending.wait()
                else:
                    checkpoint.save(tmp_path, result)
            except CheckpointError as error:
                said.append(str(error))
            FileSystemWriter.write_data = write  # type: ignore[method-assign]
            checkpoint.save(tmp_path, result)
            return said

        for said in run_ranks(work, 2):
            assert len(said) == 1
            assert "No space left on device" in said[0]
        assert names(tmp_path) == ["latest", "step-1"]

    def test_in_one_process_without_a_group(self, tmp_path: Path) -> None:
        result = make("alone", **MLP)
        step(result, next(batches(result)))
        pending = checkpoint.save(tmp_path, result, asynchronous=True)
        assert pending is not None
        assert pending.wait(timeout_s=20) == tmp_path / "step-1"
        assert not dist.is_initialized()
