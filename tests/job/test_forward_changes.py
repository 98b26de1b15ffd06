"""What forward passes change is changed once a micro-batch: said once, on all ranks, and only where it is so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch_ns import auto_accelerate
from atorch_ns.testing.workers import run_ranks
from tests.job.test_loops import PIPELINE, TENSOR, Block, Net, accelerated, batches

WORDS = "the forward pass changes "
ACCUMULATION = ("gradient_accumulation", 2)
INTERLEAVED: list[Any] = [
    PIPELINE[0],
    ("pipeline_parallel", {"num_micro_batches": 2, "schedule": "Interleaved1F1B"}),
]
STRATEGIES: dict[str, list[Any]] = {
    "ddp": ["ddp", ACCUMULATION],
    "fsdp": ["fsdp", ACCUMULATION],
    "tensor": [*TENSOR, ACCUMULATION],
    "pipeline": PIPELINE,
    "interleaved": INTERLEAVED,
    "checkpoint": ["fsdp", "checkpoint", ACCUMULATION],
}


class Counting(Block):
    """Counts its calls, and remembers what changes nothing that it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls: Any = 0
        self.history = {"seen": 0}
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", None)
        self.register_buffer("broadcast", torch.zeros(()).expand(1, 3)[:, :1])  # of stride 0

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attribute":
            self.calls += 1
        elif self.kind == "container":
            self.history["seen"] += 1
        elif self.kind == "buffer" and self.training:
            self.count += 1
        elif self.kind == "data":
            self.mean.data.mul_(0.9).add_(0.1)
        elif self.kind == "replaced":
            self.mean = self.mean * 0.9 + 0.1
        elif self.kind == "teacher":
            with torch.no_grad():
                self.teacher.weight.mul_(0.9)
        elif self.kind == "nothing":
            if self.cache is None:
                self.cache = torch.ones(2)
            self.calls = x.shape[0]  # the same for all micro-batches
            self.mean = torch.zeros(3)
            self.output = super().forward(x).square().mean()
        return super().forward(x)


CHANGED = {
    "attribute": "calls",
    "container": "history",
    "buffer": "count",
    "data": "mean",
    "replaced": "mean",
    "teacher": "teacher.weight",
}


def _net(kind: str) -> Net:
    model = Net()
    if kind == "spectral_norm":
        nn.utils.spectral_norm(model.blocks[2].up)
    elif kind == "batch_norm":
        model.blocks[2] = nn.Sequential(nn.BatchNorm1d(16), model.blocks[2])
    elif kind:
        model.blocks[2] = Counting(kind)
    return model


def _said(strategy: list[Any], kind: str, changed_on: int = 0) -> tuple[list[str], list[str]]:
    """The warnings, and the notes in the report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = accelerated(_net(kind), strategy)
        for _, batch in batches(result):
            result.train_step(batch)
    warned = [str(one.message) for one in caught if WORDS in str(one.message)]
    return warned, [note for note in result.report.applied.notes if WORDS in note]


@pytest.mark.processes
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", ["attribute", "buffer", "spectral_norm"])
def test_it_is_said_once_and_on_all_ranks(name: str, kind: str) -> None:
    if kind == "spectral_norm" and name == "tensor":
        pytest.skip("its weight is computed by a hook, and stays whole")
    ranks = run_ranks(_said, 2, args=(STRATEGIES[name], kind), timeout_s=60)
    wanted = f"{WORDS}blocks.2.{CHANGED.get(kind, 'up.weight_u')}"
    assert [len(warned) for warned, _ in ranks] == [
        1,
        0,
    ]  # by the first rank, though another may hold the module
    for _, (note,) in ranks:
        assert note.startswith(wanted)
        assert "With 2 micro-batches" in note


@pytest.mark.parametrize("kind", CHANGED)
def test_all_kinds_of_state(kind: str) -> None:
    warned, (note,) = _said([ACCUMULATION], kind)
    assert len(warned) == 1
    assert note.startswith(f"{WORDS}blocks.2.{CHANGED[kind]}.")


@pytest.mark.processes
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", ["", "nothing", "batch_norm"])
def test_no_false_alarm(name: str, kind: str) -> None:
    for said in run_ranks(_said, 2, args=(STRATEGIES[name], kind), timeout_s=60):
        assert said == ([], [])


@pytest.mark.parametrize("strategy", [[], [("gradient_accumulation", 1)]])
def test_one_micro_batch_is_as_one_process(strategy: list[Any]) -> None:
    assert _said(strategy, "attribute") == ([], [])


def test_micro_steps_of_a_loop() -> None:
    _, result, _ = auto_accelerate(
        _net("buffer"), torch.optim.SGD, loss_func=lambda b, o: (o - b).square().mean(), load_strategy=[]
    )
    assert result is not None
    with pytest.warns(UserWarning, match="changes blocks.2.count. With 3 micro-batches"):
        result.train_step.micro_steps([torch.ones(2, 16)] * 3)
