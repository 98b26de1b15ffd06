"""What is trained, and what a way to train it must offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from benchmarks._llama import Llama, random_batch

__all__ = [
    "AUTOMATIC",
    "NUM_RANKS",
    "OPTIM_ARGS",
    "TASKS",
    "Peer",
    "Start",
    "Task",
    "Trainer",
    "batch_of",
    "task_named",
]

NUM_RANKS = 2
OPTIM_ARGS: dict[str, Any] = {"lr": 1e-3}
"""Of AdamW, on all sides."""

_BF16 = ("amp_native", "bf16")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Features to train with.

    Attributes:
        name: in tables.
        strategy: ours, as ``load_strategy``.
        shards: the last that is divided among the ranks, of optimizer states, gradients and parameters.
        recompute: whether every block's activations are computed again in the backward pass.
        bf16: whether forward pass and loss run under autocast.
    """

    name: str
    strategy: Sequence[Any]
    shards: Literal["nothing", "optimizer", "gradients", "parameters"]
    recompute: bool = False
    bf16: bool = False

    @property
    def batch_size(self) -> int:
        """Samples of one rank."""
        return 4 if self.bf16 else 2

    @property
    def loss_tolerance(self) -> float:
        """How far two trainings' losses may be apart and still be called the same."""
        return 2e-2 if self.bf16 else 1e-4


TASKS: tuple[Task, ...] = (
    Task(name="DDP", strategy=["ddp"], shards="nothing"),
    Task(name="DDP, bf16 autocast", strategy=["ddp", _BF16], shards="nothing", bf16=True),
    Task(name="ZeRO-1", strategy=["zero1"], shards="optimizer"),
    Task(name="ZeRO-2", strategy=["zero2"], shards="gradients"),
    Task(name="FSDP2", strategy=["fsdp"], shards="parameters"),
    Task(name="FSDP2, checkpoint", strategy=["fsdp", "checkpoint"], shards="parameters", recompute=True),
    Task(
        name="FSDP2, checkpoint, bf16 autocast",
        strategy=["fsdp", "checkpoint", _BF16],
        shards="parameters",
        recompute=True,
        bf16=True,
    ),
)

AUTOMATIC = Task(name="a strategy found automatically", strategy=["ddp"], shards="nothing")
"""The peer chooses the strategy, if it can; on our side DDP, since what is in question is whether it runs."""


def task_named(name: str) -> Task:
    """The task of that name."""
    return next(task for task in (*TASKS, AUTOMATIC) if task.name == name)


def batch_of(task: Task, size: Llama, num_tokens: int, rank: int) -> dict[str, Tensor]:
    """A rank's part of the batch that all sides train on, step after step: its loss falls, or does not."""
    return random_batch(size, task.batch_size, num_tokens, seed=rank)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model that trains.

    Attributes:
        step: one whole training step; this rank's mean loss, before it.
        cpu_s: processor seconds that other processes have spent on it so far.
    """

    step: Callable[[], float]
    cpu_s: Callable[[], float] = field(default=lambda: 0.0)


Start = Callable[[Task, Llama, int, int], Callable[[], Trainer]]
"""``start(task, size, num_tokens, rank)`` imports what it needs and builds the plain model and the data; what it
returns is called on every rank and makes the trainer."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to train.

    Attributes:
        name: in tables.
        start: see :data:`Start`.
        prepare: called once, before any rank is started; what it returns is the reason for which the peer cannot
            be measured here, empty if it can.
        lacks: names of tasks with the reason for which it cannot do them.
        tracks_memory: whether its tensors live in the rank's own process, where they can be followed.
    """

    name: str
    start: Start
    prepare: Callable[[], str] = field(default=lambda: "")
    lacks: Mapping[str, str] = field(default_factory=dict)
    tracks_memory: bool = True
