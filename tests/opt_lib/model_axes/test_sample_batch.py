"""Sample batches for methods that look at a model before the first batch has come."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from atorch_ns.job import Inputs
from opt_lib._model_axes.sample_batch import sample_batch


class _Augmented:
    """Draws from numpy for every sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, np.random.rand()])


class _Presents(nn.Linear):
    """As models of transformers, says what it can be called with."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1, 2)}


def test_what_training_draws_from_numpy_does_not_depend_on_the_look() -> None:
    inputs = Inputs(model=nn.Linear(2, 1), dataset=_Augmented(), dataloader_args={"batch_size": 4})
    np.random.seed(3)
    expected = np.random.rand(4)
    np.random.seed(3)
    assert sample_batch(inputs).shape == (2, 2)
    assert np.array_equal(np.random.rand(4), expected)


def test_a_model_without_data_gives_its_own_inputs() -> None:
    assert sample_batch(Inputs(model=nn.Linear(2, 1))) is None
    assert sample_batch(Inputs(model=_Presents(2, 1)))["x"].shape == (1, 2)
