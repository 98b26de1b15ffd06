"""Data of MerakTrainer: random numbers that collators and workers draw are the same on ranks with the same samples."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.data import default_data_collator

from atorch_ns.testing.workers import run_ranks
from tests.merak.parts import Data, assert_equal_runs, model, run_merak, run_plain


def hidden(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Hides tokens at random, as collators for masked language models do."""
    batch = default_data_collator(samples)
    batch["input_ids"] = batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.5, 0)
    batch["attention_mask"][:, random.randrange(4)] = 0
    return batch


def hides() -> dict[str, Any]:
    return {"data_collator": hidden}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}])
def test_a_random_collator_draws_the_same_on_all_ranks_of_a_model(degrees: dict[str, int]) -> None:
    """In training and evaluation, as in one process."""
    (plain,) = run_ranks(run_plain, 1, args=("gpt2", 4, hides), timeout_s=90)
    found = run_ranks(run_merak, 2, args=("gpt2", degrees, 4, hides), timeout_s=90)
    assert_equal_runs(found[0], plain)


class Drawn(Data):
    """Samples that are drawn anew each time, as cropped images are."""

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 90, (12,))
        return {"input_ids": ids, "labels": ids}


def seen_by_workers() -> Any:
    """The batches of a step that a worker process has drawn, on each rank of a pipeline with dropout."""
    from atorch_ns.merak import MerakArguments, MerakTrainer, init

    init(pp=2)
    seen: list[torch.Tensor] = []

    class Watching(MerakTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(args[1]["input_ids"].clone())
            return super().training_step(*args, **kwargs)

    args = MerakArguments(
        "unused",
        max_steps=3,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=1,
    )
    Watching(model("gpt2", dropout=True), args, train_dataset=Drawn("gpt2")).train()
    return torch.stack(seen)


@pytest.mark.timeout(120)
def test_workers_of_ranks_with_the_same_samples_draw_the_same() -> None:
    first, second = run_ranks(seen_by_workers, 2, timeout_s=90)
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
