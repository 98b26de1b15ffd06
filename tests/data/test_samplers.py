from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from atorch_ns.data.build import build_dataloader, every_nth
from atorch_ns.data.loader import TrainLoader
from atorch_ns.data.samplers import (
    StepSampler,
    distributed_position,
    epoch_source,
    even_out,
    length_of_share,
    readable_epoch,
    split_batches,
)
from atorch_ns.errors import BatchSizeError

SIZES = st.integers(min_value=0, max_value=70)
RANKS = st.integers(min_value=1, max_value=6)
PER_RANK = st.integers(min_value=1, max_value=5)


def batches_of(
    length: int, num_ranks: int, batch_size: int, *, shuffle: bool, drop_last: bool, epoch: int
) -> list[list[int]]:
    """For each step, the indices that all ranks load together, rank by rank."""
    loaders: list[TrainLoader] = [
        build_dataloader(
            range(length),
            args={"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "collate_fn": list},
            sampler_cls=None,
            seed=3,
            data_rank=rank,
            num_data_ranks=num_ranks,
            group=None,
        )
        for rank in range(num_ranks)
    ]
    for loader in loaders:
        loader.set_epoch(epoch)
    per_rank = [list(loader) for loader in loaders]
    assert [len(batches) for batches in per_rank] == [len(loader) for loader in loaders]
    return [[index for part in step for index in part] for step in zip(*per_rank, strict=True)]


@settings(deadline=None, max_examples=80)
@given(length=SIZES, num_ranks=RANKS, per_rank=PER_RANK, shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_the_ranks_load_the_batches_of_one_process(
    length: int, num_ranks: int, per_rank: int, shuffle: bool, epoch: int
) -> None:
    size = num_ranks * per_rank
    one = batches_of(length, 1, size, shuffle=shuffle, drop_last=False, epoch=epoch)
    many = batches_of(length, num_ranks, size, shuffle=shuffle, drop_last=False, epoch=epoch)
    order = [index for batch in one for index in batch]

    assert len(one) == len(many)
    for step, (alone, together) in enumerate(zip(one, many, strict=True)):
        if step < length // size:
            assert sorted(together) == sorted(alone)
        else:  # the tail, continued with the beginning of the order up to a multiple of the ranks
            missing = -length % num_ranks
            assert sorted(together) == sorted([*alone, *(order * num_ranks)[:missing]])


@settings(deadline=None, max_examples=60)
@given(length=SIZES, num_ranks=RANKS, per_rank=PER_RANK, shuffle=st.booleans())
def test_with_drop_last_every_batch_is_that_of_one_process(
    length: int, num_ranks: int, per_rank: int, shuffle: bool
) -> None:
    size = num_ranks * per_rank
    one = batches_of(length, 1, size, shuffle=shuffle, drop_last=True, epoch=1)
    many = batches_of(length, num_ranks, size, shuffle=shuffle, drop_last=True, epoch=1)
    assert len(one) == length // size
    assert [sorted(batch) for batch in many] == [sorted(batch) for batch in one]


@given(length=SIZES, num_ranks=RANKS, drop_last=st.booleans())
def test_evening_out_does_what_torch_does(length: int, num_ranks: int, drop_last: bool) -> None:
    evened = even_out(range(length), num_ranks, drop_last=drop_last)
    samplers = [
        DistributedSampler(range(length), num_ranks, rank, shuffle=False, drop_last=drop_last)
        for rank in range(num_ranks)
    ]
    assert [evened[rank::num_ranks] for rank in range(num_ranks)] == [list(sampler) for sampler in samplers]
    assert length_of_share(length, num_ranks, drop_last=drop_last) == len(samplers[0])


@given(batches=st.lists(st.lists(st.integers(), max_size=5), max_size=5), num_ranks=RANKS)
def test_the_shares_of_a_batch_are_the_batch(batches: list[list[int]], num_ranks: int) -> None:
    whole = [batch * num_ranks for batch in batches]
    shares = [split_batches(whole, rank, num_ranks) for rank in range(num_ranks)]
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        assert len({len(part) for part in parts}) == 1
        assert sorted(entry for part in parts for entry in part) == sorted(batch)


def test_a_batch_that_cannot_be_shared_is_named() -> None:
    with pytest.raises(BatchSizeError, match=r"batch 1 .* has 5 entries.* 2 data-parallel.* are 4 and 6"):
        split_batches([[0, 1], [1, 2, 3, 4, 5]], 0, 2)


@given(length=SIZES, num_ranks=RANKS)
def test_a_stream_is_shared_in_complete_rounds(length: int, num_ranks: int) -> None:
    shares = [list(every_nth(iter(range(length)), rank, num_ranks)) for rank in range(num_ranks)]
    assert {len(share) for share in shares} == {length // num_ranks}
    taken = sorted(entry for share in shares for entry in share)
    assert taken == list(range(length // num_ranks * num_ranks))


def test_skipped_steps_are_counted_in_the_length() -> None:
    steps = StepSampler([[0], [1], [2]])
    steps.skip = 2
    assert list(steps) == [[2]]
    assert len(steps) == 3


def test_the_sampler_inside_is_found() -> None:
    inner = DistributedSampler(range(8), num_replicas=2, rank=1)
    wrapped = StepSampler(BatchSampler(inner, 2, drop_last=False))
    assert epoch_source(wrapped) is inner
    assert readable_epoch(inner) == 0
    assert distributed_position(wrapped) == (2, 1)


def test_a_plain_sampler_has_neither_epoch_nor_position() -> None:
    sampler = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    assert epoch_source(sampler) is None
    assert readable_epoch(None) is None
    assert distributed_position(sampler) is None
