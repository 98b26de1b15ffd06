"""A run that starts again on another number of ranks: the same strategy fitted, no sample lost or seen twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import checkpoint
from atorch_ns.api import auto_accelerate
from atorch_ns.errors import AtorchError, BatchSizeError
from atorch_ns.job import Result
from atorch_ns.testing.workers import run_ranks

NUM_SAMPLES, BATCH = 64, 12  # five whole batches, and four samples that are dropped
STRATEGY = [("parallel_mode", ([("data", 3)], None)), "fsdp"]


def make(strategy: Any = STRATEGY, batch_size: int = BATCH) -> Result:
    torch.manual_seed(0)
    _, result, _ = auto_accelerate(
        nn.Linear(1, 1),
        torch.optim.AdamW,
        [torch.tensor([float(number)]) for number in range(NUM_SAMPLES)],
        lambda batch, output: (output - batch / NUM_SAMPLES).square().mean(),
        dataloader_args={"batch_size": batch_size, "shuffle": True, "drop_last": True},
        load_strategy=strategy,
    )
    assert result is not None
    return result


def go_on(folder: Path, num_batches: int) -> tuple[int | None, dict[str, int], list[list[int]]]:
    """Where it began, the axes, and this rank's samples of every batch."""
    result = make()
    loaded = checkpoint.resume(folder, result)
    batches = []
    for batch in result.dataloader or ():
        result.train_step(batch)
        batches.append([int(number) for number in batch.flatten()])
        if len(batches) == num_batches:
            break
    checkpoint.save(folder, result)
    assert result.job.mesh is not None
    return None if loaded is None else loaded["step"], dict(result.job.mesh.axes), batches


def of_all(parts: list[Any]) -> list[list[int]]:
    """The global batches, each sorted."""
    return [sorted(number for rank in batch for number in rank) for batch in zip(*parts, strict=True)]


def test_the_epoch_goes_on_with_the_next_global_batch(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    for num_ranks, num_batches, step in ((3, 2, None), (2, 1, 2), (1, 2, 3)):
        told = run_ranks(go_on, num_ranks, args=(tmp_path / "runs", num_batches))
        assert {began for began, _, _ in told} == {step}
        assert told[0][1] == {"data": num_ranks}  # the strategy says 3
        seen += of_all([batches for *_, batches in told])
    whole = run_ranks(go_on, 3, args=(tmp_path / "whole", 5))
    assert seen == of_all([batches for *_, batches in whole])
    assert len({number for batch in seen for number in batch}) == 5 * BATCH


def refused() -> list[str]:
    """What a world of three says to a strategy and to a batch of two."""
    texts = []
    for kind, strategy, batch_size in (
        (AtorchError, [("parallel_mode", ([("tensor", 2), ("data", 2)], None))], BATCH),
        (BatchSizeError, STRATEGY, 8),
    ):
        with pytest.raises(kind) as caught:
            make(strategy, batch_size)
        texts.append(str(caught.value))
    return texts


def test_what_does_not_fit_the_new_world_is_an_error_that_says_what_would() -> None:
    for tensor, batch in run_ranks(refused, 3):
        assert "tensor=2 does not divide 3 processes. Use tensor in {1, 3} or start 2 processes" in tensor
        assert "6 or 9" in batch or "9" in batch, batch
