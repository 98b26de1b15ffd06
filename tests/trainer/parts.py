"""Components that tests of the Trainer name: a model, data, hooks and loggers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atorch_ns.trainer import AggregatedOutputs, LoggerBase, TrainHook

VOCABULARY, TOKENS = 32, 8


class Model(nn.Module):
    """A small language model whose forward pass gives the loss and the number of tokens."""

    def __init__(self, dim: int = 16, nlayers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(nlayers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(data["ids"])
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x))) + x
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), data["labels"].flatten())
        return loss, torch.tensor(data["ids"].numel())


class Dataset:
    """Sequences drawn by their number."""

    def __init__(self, size: int = 24, seed: int = 0) -> None:
        self.size, self.seed = size, seed

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(1000 * self.seed + place)
        ids = torch.randint(VOCABULARY, (TOKENS,), generator=draws)
        return {"ids": ids, "labels": ids.roll(1)}

    def __len__(self) -> int:
        return self.size


class Draws(Dataset):
    """As :class:`Dataset`, with ids that are drawn anew each time."""

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (TOKENS,))
        return {"ids": ids, "labels": ids.roll(1)}


class Told(TrainHook):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        for name in dir(TrainHook):
            if not name.startswith("_"):
                setattr(type(self), name, _told(name))


def _told(name: str) -> Any:
    def told(self: Told, trainer: Any, **arguments: Any) -> None:
        self.seen.append(name)

    return told


class Lines(LoggerBase):
    """Appends metrics to a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def log_metrics(self, metrics: Any, step: int, *, tag: str | None = None) -> None:
        with self._path.open("a") as file:
            file.write(f"{tag} {step} {' '.join(metrics)}\n")


def aggregate(outputs: list[Any], group: Any) -> AggregatedOutputs:
    """Sums of losses and tokens over the ranks of a group."""
    found = torch.tensor(
        [sum(float(loss) for loss, _ in outputs), len(outputs), sum(int(n) for _, n in outputs)],
        dtype=torch.float64,
    )
    if group is not None:
        torch.distributed.all_reduce(found, group=group)
    loss_sum, count, tokens = found.tolist()
    return AggregatedOutputs(loss_sum=loss_sum, num_batches=int(count), num_tokens=int(tokens))


class Stream(torch.utils.data.IterableDataset[Any]):
    """The samples of a :class:`Dataset`, one after the other."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __iter__(self) -> Any:
        dataset = Dataset(self.size)
        return iter([dataset[place] for place in range(self.size)])


def collated(items: list[Any]) -> Any:
    """As torch collates, ids shifted by one."""
    ids = torch.stack([item["ids"] for item in items])
    return {"ids": (ids + 1) % VOCABULARY, "labels": ids}


def seeded(trainer: Any) -> None:
    """An ``init_env_fn``."""
    torch.manual_seed(5)


def pause(trainer: Any, **told: Any) -> None:
    """A step that takes a while."""
    time.sleep(0.05)


def die_once(trainer: Any, **told: Any) -> None:
    """Kills the second rank after the sixth step, if nobody has been killed yet."""
    path = Path(os.environ["DIES_BY"])
    if trainer.rank == 1 and trainer.train_status.finished_train_steps == 6 and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
