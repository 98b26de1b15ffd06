"""Real values among fake tensors: what a model may read while it is traced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from atorch_ns.capture.real_values import RealValues, may_be_real
from atorch_ns.torch_compat import fake_tensor_mode, fake_tensor_type

CPU = torch.device("cpu")


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, fake_tensor_type())


def test_a_mask_can_be_read_and_floats_have_no_values() -> None:
    mask = torch.ones(2, 3, dtype=torch.int64)
    with fake_tensor_mode(), RealValues():
        assert bool((mask == 1).all())
        positions = torch.arange(4)
        assert positions.tolist() == [0, 1, 2, 3]
        assert _is_fake(torch.zeros(2, 2))
        assert _is_fake(torch.zeros(2, 4) + positions)


def test_large_and_random_tensors_stay_fake() -> None:
    with fake_tensor_mode(), RealValues():
        assert _is_fake(torch.arange(1 << 22))
        assert _is_fake(torch.randint(8, (2,)))


def test_a_value_written_in_place_is_read_again() -> None:
    mask = torch.zeros(3, dtype=torch.bool)
    with fake_tensor_mode(), RealValues():
        mask.fill_(True)
        assert bool(mask.all())


def test_a_reduced_loss_keeps_the_memory_of_its_elements() -> None:
    with fake_tensor_mode(), RealValues():
        loss = F.mse_loss(torch.zeros(4, 8), torch.zeros(4, 8))
    assert loss.dim() == 0
    assert loss.untyped_storage().nbytes() == 4 * 8 * 4


@pytest.mark.parametrize(
    ("tensor", "num_elements", "real"),
    [
        (torch.ones(2, dtype=torch.int64), 2, True),
        (torch.ones(2, dtype=torch.bool), 2, True),
        (torch.ones(2), 2, False),
        (torch.ones(2, dtype=torch.int64), 1 << 22, False),
        (torch.ones(2, dtype=torch.int64, device="meta"), 2, False),
    ],
)
def test_small_integers_of_a_batch_keep_their_values(
    tensor: torch.Tensor, num_elements: int, real: bool
) -> None:
    assert may_be_real(tensor, num_elements, CPU) is real
