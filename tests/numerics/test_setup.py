"""The small job of a probe: its model, its values and its batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.cluster.cluster import cpu_hardware
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs
from atorch_ns.method import load_registry
from atorch_ns.numerics.reference import MAX_PARTS, part_of_ranks
from atorch_ns.numerics.setup import draw_batches, fill, prepare, round_to, structure_of
from atorch_ns.strategy import Strategy


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 2.0))


def test_a_structure_keeps_ties_and_buffers_and_takes_no_memory() -> None:
    model = Tied()
    copied, originals = structure_of(model, shallow=False)
    assert copied.head.weight is copied.embedding.weight
    assert all(parameter.is_meta for parameter in copied.parameters())
    assert copied.scale.item() == 2.0
    assert copied.scale is not model.scale
    assert originals[copied.head.weight] is model.head.weight


def test_a_shallow_one_knows_which_blocks_it_kept() -> None:
    model = Tied()
    copied, originals = structure_of(model, shallow=True)
    assert len(copied.blocks) == 3, "the first, the last and one between them"
    assert originals[copied.blocks[2][0].weight] is model.blocks[5][0].weight


def test_values_are_the_originals_and_constants_get_noise() -> None:
    model = Tied()
    with torch.no_grad():
        model.blocks[0][0].bias.zero_()
    copied, originals = structure_of(model, shallow=False)
    fill(copied, originals, torch.device("cpu"), seed=1)
    assert torch.equal(copied.head.weight, model.head.weight)
    assert copied.head.weight is copied.embedding.weight
    noise = copied.blocks[0][0].bias
    assert 0 < noise.abs().max() < 0.2, "behind a layer of zeros a lost gradient would not be missed"
    assert not model.blocks[0][0].bias.any()


def test_rounding_leaves_integers_alone() -> None:
    model = nn.Linear(2, 2)
    model.count = nn.Parameter(torch.tensor([257]), requires_grad=False)
    round_to(model, torch.bfloat16)
    assert torch.equal(model.weight, model.weight.bfloat16().float())
    assert model.count.item() == 257


def test_a_rank_may_use_half_of_its_memory() -> None:
    inputs = Inputs(
        model=nn.Linear(4, 4), sample_batch=torch.randn(2, 4), loss_func=lambda batch, output: output.sum()
    )
    num_bytes = 4 * 4 * (4 * 4 + 4)
    for memory in (2 * num_bytes, 2 * num_bytes - 2):
        cluster = Cluster(local_world_size=2, device_memory_bytes=memory, hardware=cpu_hardware(2, memory))
        refused = (
            nullcontext() if memory == 2 * num_bytes else pytest.raises(InputError, match="may use only")
        )
        with refused:
            prepare(inputs, cluster, Strategy([]), load_registry(), shallow=False, rows=1)


def _drawn(dataset: Any, **args: Any) -> list[list[Any]]:
    inputs = Inputs(model=nn.Identity(), dataset=dataset, dataloader_args={"batch_size": 4})
    return draw_batches(inputs, **args)


def test_batches_cycle_through_a_small_dataset() -> None:
    batches = _drawn(list(range(3)), num_parts=2, num_rows=4)
    assert [[part.tolist() for part in step] for step in batches] == [
        [[0, 1, 2, 0], [1, 2, 0, 1]],
        [[2, 0, 1, 2], [0, 1, 2, 0]],
    ]
    (step,) = _drawn(list(range(9)), num_parts=3, num_rows=4, num_steps=1, alike=True)
    assert [part.tolist() for part in step] == [[0, 1, 2, 3], [1, 0, 3, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("dataset", [[], iter(range(9))])
def test_a_dataset_that_training_would_lose_is_left_alone(dataset: Any) -> None:
    with pytest.raises(InputError, match="empty, or can be iterated over only once"):
        _drawn(dataset, num_parts=1, num_rows=1)
    assert len(list(dataset)) in (0, 9)


def test_many_ranks_share_eight_parts_and_all_are_used() -> None:
    assert part_of_ranks(3) == (0, 1, 2)
    assert set(part_of_ranks(64)) == set(range(MAX_PARTS))
    assert part_of_ranks(64) == part_of_ranks(64)
