"""What memory is asked about, and what a way to answer must offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks._memory_cases import SizedCase

__all__ = ["SETUPS", "Estimator", "Question", "Setup"]

_BF16 = ("amp_native", "bf16")
_MASTERS = ("half", {"dtype": "bf16", "master_weights": True})


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model is trained.

    Attributes:
        name: in tables.
        strategy: ours, as ``load_strategy``.
        num_ranks: processes; 1 for a plain script.
        shards: the last that is divided among the ranks, of optimizer states, gradients and parameters; of a
            plain script and of DDP nothing is.
        recompute: whether every block's activations are computed again in the backward pass.
        bf16: whether forward pass and loss run under autocast.
        masters: whether weights are bf16 and the optimizer keeps fp32 copies of them.
    """

    name: str
    strategy: Sequence[Any]
    num_ranks: int = 2
    shards: Literal["nothing", "optimizer", "gradients", "parameters"] = "nothing"
    recompute: bool = False
    bf16: bool = False
    masters: bool = False


SETUPS: tuple[Setup, ...] = (
    Setup(name="1 process", strategy=[], num_ranks=1),
    Setup(name="1 process, checkpoint", strategy=["checkpoint"], num_ranks=1, recompute=True),
    Setup(name="1 process, bf16 autocast", strategy=[_BF16], num_ranks=1, bf16=True),
    Setup(name="DDP", strategy=["ddp"]),
    Setup(name="DDP, bf16 autocast", strategy=["ddp", _BF16], bf16=True),
    Setup(name="ZeRO-1", strategy=["zero1"], shards="optimizer"),
    Setup(name="ZeRO-2", strategy=["zero2"], shards="gradients"),
    Setup(
        name="ZeRO-2, bf16 weights and fp32 masters",
        strategy=["zero2", _MASTERS],
        shards="gradients",
        masters=True,
    ),
    Setup(name="FSDP2", strategy=["fsdp"], shards="parameters"),
    Setup(
        name="FSDP2, bf16 weights and fp32 masters",
        strategy=["fsdp", _MASTERS],
        shards="parameters",
        masters=True,
    ),
    Setup(name="FSDP2, checkpoint", strategy=["fsdp", "checkpoint"], shards="parameters", recompute=True),
    Setup(
        name="FSDP2, checkpoint, bf16 autocast",
        strategy=["fsdp", "checkpoint", _BF16],
        shards="parameters",
        recompute=True,
        bf16=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """How many bytes the rank that holds most needs for a training step.

    Attributes:
        sized: model, data and loss.
        setup: how it is trained, with AdamW.
    """

    sized: SizedCase
    setup: Setup

    def batch(self) -> Any:
        """One rank's part of a step's samples."""
        return self.sized.case.make_batch(self.sized.global_batch // self.setup.num_ranks, 0)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """A way to answer.

    Attributes:
        name: in tables.
        claims: what its figure is said to be, a sentence without its subject.
        states_only: whether that leaves activations and buffers out.
        start: imports what is needed and builds the plain model; what it returns is called once for the answer,
            in bytes, in a process of its own without a process group.
        prepare: called once, before any process is started; what it returns is the reason for which nothing can
            be asked here, empty if it can.
        lacks: the reason for which it has no answer for a setup, empty if it has.
    """

    name: str
    claims: str
    states_only: bool = False
    start: Callable[[Question], Callable[[], int]]
    prepare: Callable[[], str] = field(default=lambda: "")
    lacks: Callable[[Setup], str] = field(default=lambda setup: "")
