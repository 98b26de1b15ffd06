"""A resumed run sees the batches and draws the random numbers of one that was never interrupted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import checkpoint
from atorch_ns.api import auto_accelerate
from atorch_ns.checkpoint import contents
from atorch_ns.job import Result
from atorch_ns.testing.parity import snapshot
from atorch_ns.testing.workers import run_ranks

SIZE, BATCH = 32, 4


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x / SIZE)
        return out


def make(num_workers: int = 0) -> Result:
    torch.manual_seed(3)
    model = Noisy()
    if dist.is_initialized():
        for source in (torch.manual_seed, random.seed, np.random.seed):
            source(100 + dist.get_rank())
    _, result, _ = auto_accelerate(
        model,
        optim_func=torch.optim.SGD,
        optim_args={"lr": 0.1},
        dataset=[torch.tensor([float(number)]) for number in range(SIZE)],
        dataloader_args={"batch_size": BATCH, "shuffle": True, "num_workers": num_workers},
        loss_func=lambda batch, output: (output - batch / SIZE).square().mean(),
        load_strategy=["ddp"] if dist.is_initialized() else [],
    )
    assert result is not None
    return result


class Training:
    """A loop over as many epochs as it takes, stopped after any batch."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self._batches = self._endless()

    def run(self, steps: int) -> list[list[float]]:
        """Trains, and returns what each step saw here."""
        return [self._step(batch) for batch in itertools.islice(self._batches, steps)]

    def _step(self, batch: torch.Tensor) -> list[float]:
        self.result.train_step(batch)
        seen: list[float] = batch.flatten().tolist()
        return seen

    def _endless(self) -> Iterator[torch.Tensor]:
        assert self.result.dataloader is not None
        while True:
            yield from self.result.dataloader


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand()), random.gauss(0, 1)]


def interrupted(folder: Path, before: int, after: int) -> list[dict[str, Any]]:
    """One job that goes on after saving, and one that is made anew and loads."""
    training = Training(make())
    training.run(before)
    random.gauss(0, 1)  # leaves a second number behind, which is part of the state
    checkpoint.save(folder, training.result)
    ends = [end(training, after)]
    training = Training(make())
    draws()
    checkpoint.load(folder, training.result)
    return [*ends, end(training, after)]


def end(training: Training, steps: int) -> dict[str, Any]:
    seen = training.run(steps)
    return {"seen": seen, "draws": draws(), "model": snapshot(training.result.model)}


@pytest.mark.parametrize("before", [3, 8, 11], ids=["mid-epoch", "end of epoch", "second epoch"])
def test_dropout_and_data_go_on(tmp_path: Path, before: int) -> None:
    for whole, resumed in run_ranks(interrupted, 2, args=(tmp_path, before, 12)):
        assert resumed["seen"] == whole["seen"]
        assert resumed["draws"] == whole["draws"]
        assert [
            name for name in whole["model"] if not torch.equal(whole["model"][name], resumed["model"][name])
        ] == []


def save_at(folder: Path, steps: int) -> list[list[float]]:
    training = Training(make())
    training.run(steps)
    checkpoint.save(folder, training.result)
    return training.run(6)


def load_and_run(folder: Path, num_workers: int) -> tuple[list[list[float]], list[float], list[str]]:
    result = make(num_workers)
    loaded = checkpoint.load(folder, result)
    drawn = draws()
    return Training(result).run(6), drawn, loaded["notes"]


def test_another_number_of_ranks_sees_the_same_global_batches(tmp_path: Path) -> None:
    def batches(ranks: list[list[list[float]]]) -> list[list[float]]:
        return [sorted(sample for rank in ranks for sample in rank[number]) for number in range(6)]

    expected = batches(run_ranks(save_at, 2, args=(tmp_path, 3)))
    wide = run_ranks(load_and_run, 4, args=(tmp_path, 1))
    assert batches([seen for seen, _, _ in wide]) == expected
    assert batches([load_and_run(tmp_path, 0)[0]]) == expected
    drawn = [tuple(numbers) for _, numbers, _ in wide]
    assert len(set(drawn)) == 4  # ranks 2 and 3 have streams of their own
    assert all("do not continue exactly" in notes[0] for _, _, notes in wide)


def test_ranks_in_lockstep_stay_so(tmp_path: Path) -> None:
    def equal_states(path: Path, load: bool) -> list[float]:
        result = make()
        for source in (torch.manual_seed, random.seed, np.random.seed):
            source(7)
        if load:
            draws()
            checkpoint.load(path, result)
        else:
            checkpoint.save(path, result)
        return draws()

    saved = run_ranks(equal_states, 2, args=(tmp_path, False))
    assert run_ranks(equal_states, 4, args=(tmp_path, True)) == [saved[0]] * 4


def test_states_of_every_generator() -> None:
    random.gauss(0, 1)
    np.random.randn()
    states = contents.capture_rng(torch.device("cpu"))
    first = [draws(), float(np.random.randn())]
    mark = contents.rng_digest(contents.capture_rng(torch.device("cpu")))
    contents.restore_rng(states, torch.device("cpu"))
    assert (
        contents.rng_digest(contents.capture_rng(torch.device("cpu"))) == contents.rng_digest(states) != mark
    )
    assert [draws(), float(np.random.randn())] == first
