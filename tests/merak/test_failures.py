"""Failures on one rank of a MerakTrainer: all ranks end within seconds, and know the cause."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.testing.workers import catch_ranks
from tests.merak.parts import Data, model

FAILING_RANK = 1


class Spoilt(Data):
    """Samples that one rank cannot read, after the first few."""

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        if dist.get_rank() == FAILING_RANK and place > self.size - 12:
            raise OSError("the disk is gone")
        return super().__getitem__(place)


class Objects(TrainerCallback):
    """A callback that fails on one rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == FAILING_RANK and state.global_step == 2:
            raise RuntimeError("the callback objects")


def unmeasurable(_: Any) -> dict[str, float]:
    if dist.get_rank() == FAILING_RANK:
        raise ValueError("no metric for this")
    return {"metric": 0.0}


def run(what: str, degrees: dict[str, int]) -> None:
    init(**degrees)
    args = MerakArguments(
        "unused",
        max_steps=9,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    trainer = MerakTrainer(
        model("gpt2"),
        args,
        train_dataset=Spoilt("gpt2") if what == "dataset" else Data("gpt2"),
        eval_dataset=Data("gpt2", 8),
        callbacks=[Objects] if what == "callback" else [],
        compute_metrics=unmeasurable,
    )
    trainer.train()
    trainer.evaluate()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "cause", "degrees"),
    [
        ("dataset", "the disk is gone", {"pp": 2}),
        ("callback", "the callback objects", {"tp": 2}),
        ("metrics", "no metric for this", {"dp": 2}),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_its_cause(
    what: str, cause: str, degrees: dict[str, int]
) -> None:
    began = time.monotonic()
    first, second = catch_ranks(run, 2, args=(what, degrees), timeout_s=90)
    assert time.monotonic() - began < 80.0
    assert cause in str(second.error)
    if what != "metrics":  # after which nothing is exchanged any more
        assert first.status == "raised"
        assert cause in str(first.error)
