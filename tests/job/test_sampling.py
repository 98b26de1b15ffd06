"""What stands for the user's data in profiles and trials."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from atorch_ns.errors import InputError
from atorch_ns.job import Inputs
from atorch_ns.job.sampling import first_batch, forward_loss, sample_inputs


class _Counting(Dataset[Any]):
    """Draws from every random state, as augmentations do, and counts what it was asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        random.random()
        np.random.rand()
        return torch.rand(4)


def _inputs(dataset: Any, **changes: Any) -> Inputs:
    inputs = Inputs(
        model=nn.Linear(4, 2),
        optim_func=torch.optim.AdamW,
        dataset=dataset,
        dataloader_args={"batch_size": 8, "shuffle": True, "num_workers": 2},
        loss_func=lambda batch, output: output.square().mean(),
    )
    return replace(inputs, **changes)


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


class _Once(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> torch.Tensor:
        raise AssertionError("this sample is lost for training")


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((4,), float(value)) for value in range(100))


def test_samples_are_few_and_cycled_and_the_random_states_stay() -> None:
    dataset = _Counting(1000)
    inputs = _inputs(dataset)
    before = _random_states()
    sample = sample_inputs(inputs, num_data_ranks=2)
    assert _random_states() == before
    assert dataset.asked == 16, "two global batches"
    assert sample.global_batch == 8
    assert sample.batch.shape == (4, 4)
    assert len(sample.inputs.dataset) == 64 * 8
    assert torch.equal(sample.inputs.dataset[0], sample.inputs.dataset[16])
    assert "shuffle" not in sample.inputs.dataloader_args
    assert "num_workers" not in sample.inputs.dataloader_args


def test_a_short_dataset_is_cycled() -> None:
    sample = sample_inputs(_inputs(TensorDataset(torch.arange(12.0).view(3, 4))), num_data_ranks=1)
    assert torch.equal(sample.inputs.dataset[3][0], torch.arange(4.0))


def test_a_stream_is_sampled_from_an_iterator_of_its_own() -> None:
    stream = _Stream()
    sample = sample_inputs(_inputs(stream), num_data_ranks=1)
    assert sample.inputs.dataset[1].tolist() == [1.0] * 4
    assert next(iter(stream)).tolist() == [0.0] * 4


def test_what_can_be_read_once_is_not_read() -> None:
    with pytest.raises(InputError, match="sample_batch"):
        sample_inputs(_inputs(_Once()), num_data_ranks=1)


def test_a_sample_batch_stands_for_the_dataset() -> None:
    batch = {"x": torch.arange(24.0).view(6, 4), "y": torch.arange(6)}
    sample = sample_inputs(_inputs(None, dataloader_args=None), num_data_ranks=2, sample_batch=batch)
    assert sample.global_batch == 6
    rows = [sample.inputs.dataset[index] for index in range(8)]
    joined = sample.inputs.dataloader_args["collate_fn"](rows)
    assert joined["y"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert joined["x"].shape == (8, 4)
    again = sample_inputs(
        _inputs(None, dataloader_args=None), num_data_ranks=2, sample_batch=batch, batch_size=32
    )
    assert again.global_batch == 32


def test_what_is_missing_is_named_together() -> None:
    with pytest.raises(InputError, match=r"optim_func, loss_func, dataset \(or sample_batch\)"):
        sample_inputs(_inputs(None, optim_func=None, loss_func=None, dataloader_args=None), num_data_ranks=1)


def test_a_dataset_that_raises_is_blamed_with_its_sample() -> None:
    class Broken(_Counting):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 3:
                raise KeyError("no such file")
            return super().__getitem__(index)

    with pytest.raises(InputError, match=r"sample 3.*no such file"):
        sample_inputs(_inputs(Broken(10)), num_data_ranks=1)


@pytest.mark.parametrize("array", [torch.empty, np.empty])
def test_large_samples_are_not_all_held(array: Any) -> None:
    class Large(_Counting):
        def __getitem__(self, index: int) -> torch.Tensor:
            self.asked += 1
            return array(
                20 * 2**20, dtype=torch.float64 if array is torch.empty else np.float64
            )  # 160 MiB, never written

    dataset = Large(100)
    sample = sample_inputs(_inputs(dataset, dataloader_args={"batch_size": 8}), num_data_ranks=1)
    assert dataset.asked == 2
    assert len(sample.inputs.dataset) >= 8


def test_the_loss_is_that_of_a_step() -> None:
    sample = sample_inputs(_inputs(_Counting(16)), num_data_ranks=1)
    model = nn.Linear(4, 2)
    loss = forward_loss(sample.inputs)(model, sample.batch)
    assert torch.equal(loss, model(sample.batch).square().mean())


def test_a_first_batch_is_as_in_training_and_leaves_all_random_states() -> None:
    """A dataset that augments with numpy must not go on from elsewhere in training."""
    dataset = _Counting(1000)
    inputs = _inputs(dataset, prepare_input=lambda batch, _: {"x": batch})
    before = _random_states()
    batch = first_batch(inputs, 3, torch.device("cpu"))
    assert batch["x"].shape == (3, 4)
    assert _random_states() == before
    assert dataset.asked == 3


def test_a_first_batch_has_all_its_rows_from_a_stream_or_a_short_dataset() -> None:
    streamed = first_batch(_inputs(_Stream()), 3, torch.device("cpu"))
    assert streamed[:, 0].tolist() == [0.0, 1.0, 2.0]
    (short,) = first_batch(_inputs(TensorDataset(torch.arange(8.0).view(2, 4))), 3, torch.device("cpu"))
    assert short[:, 0].tolist() == [0.0, 4.0, 0.0]


def test_a_dataset_of_batches_gives_its_first() -> None:
    inputs = _inputs([torch.zeros(5, 4), torch.ones(5, 4)], dataloader_args={"batch_size": None})
    assert first_batch(inputs, 2, torch.device("cpu")).shape == (5, 4)


@pytest.mark.parametrize("dataset", [None, [], _Once()])
def test_there_is_no_first_batch_without_data_that_can_be_read_again(dataset: Any) -> None:
    assert first_batch(_inputs(dataset), 2, torch.device("cpu")) is None
