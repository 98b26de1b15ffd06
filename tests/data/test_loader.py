from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from atorch_ns.data.build import build_dataloader
from atorch_ns.data.loader import TrainLoader
from atorch_ns.errors import InputError


class Recorder(Dataset[int]):
    """Its own indices, remembering which were loaded in this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Hidden(Sampler[int]):
    """A sampler with ``set_epoch`` that shows no epoch."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class EpochStream(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 12))


def build(dataset: Any, *, rank: int = 0, num_ranks: int = 1, **args: Any) -> TrainLoader:
    return build_dataloader(
        dataset, args=args, sampler_cls=None, seed=5, data_rank=rank, num_data_ranks=num_ranks, group=None
    )


def listed(loader: TrainLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def taken(loader: TrainLoader, num_batches: int) -> list[list[int]]:
    """The first batches of an iteration that is then left."""
    return [batch.tolist() for _, batch in zip(range(num_batches), loader, strict=False)]


def epochs(num_epochs: int, length: int = 12, **args: Any) -> list[list[list[int]]]:
    """What each epoch holds, when each is named."""
    loader = build(range(length), shuffle=True, **args)
    orders = []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        orders.append(listed(loader))
    return orders


class TestEpochs:
    def test_iterations_advance_without_a_call(self) -> None:
        expected = epochs(3, batch_size=4)
        assert len({str(order) for order in expected}) == 3
        loader = build(range(12), shuffle=True, batch_size=4)
        assert [listed(loader) for _ in range(3)] == expected

    @pytest.mark.processes
    def test_they_do_so_with_persistent_workers(self) -> None:
        loader = build(range(12), shuffle=True, batch_size=4, num_workers=1, persistent_workers=True)
        assert [listed(loader) for _ in range(3)] == epochs(3, batch_size=4)

    def test_an_iteration_left_early_counts(self) -> None:
        expected = epochs(3, batch_size=4)
        loader = build(range(12), shuffle=True, batch_size=4)
        assert taken(loader, 1) == expected[0][:1]
        held = iter(loader)
        assert next(held).tolist() == expected[1][0]
        assert listed(loader) == expected[2]

    def test_an_iterator_that_gave_nothing_does_not_count(self) -> None:
        loader = build(range(12), shuffle=True, batch_size=4)
        iter(loader)
        assert listed(loader) == epochs(1, batch_size=4)[0]

    def test_the_last_batch_asked_for_by_count_ends_the_epoch(self) -> None:
        expected = epochs(2, batch_size=4)
        loader = build(range(12), shuffle=True, batch_size=4)
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(len(loader))] == expected[0]
        assert listed(loader) == expected[1]

    @pytest.mark.parametrize("epoch", [0, 1, 2, 7])
    def test_the_samplers_own_set_epoch_is_respected(self, epoch: Any) -> None:
        loader = build(range(12), shuffle=True, batch_size=4)
        listed(loader)
        loader.sampler.set_epoch(epoch)
        assert listed(loader) == epochs(8, batch_size=4)[epoch]
        assert loader.sampler.epoch == epoch + 1

    def test_during_an_iteration_too(self) -> None:
        loader = build(range(12), shuffle=True, batch_size=4)
        for _ in loader:
            loader.sampler.set_epoch(5)
        assert loader.state_dict()["epoch"] == 5
        for _ in loader:
            loader.set_epoch(5)
        assert loader.state_dict()["epoch"] == 5

    def test_a_users_distributed_sampler_advances(self) -> None:
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0, seed=5)
        loader = build(range(12), sampler=sampler, batch_size=4)
        assert [listed(loader) for _ in range(2)] == epochs(2, batch_size=4)

    def test_so_does_one_inside_a_batch_sampler(self) -> None:
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0, seed=5)
        loader = build(range(12), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
        assert [listed(loader) for _ in range(2)] == epochs(2, batch_size=4)

    def test_a_sampler_that_shows_no_epoch_hears_only_what_is_said(self) -> None:
        sampler = Hidden()
        loader = build(range(3), sampler=sampler)
        listed(loader)
        listed(loader)
        assert sampler.told == []
        assert loader.state_dict()["epoch"] == 2
        loader.set_epoch(4)
        assert sampler.told == [4]

    def test_a_stream_advances_and_listens(self) -> None:
        dataset = EpochStream()
        loader = build(dataset, batch_size=12)
        assert [listed(loader)[0][0], listed(loader)[0][0]] == [0, 100]
        dataset.set_epoch(7)
        assert listed(loader)[0][0] == 700
        loader.set_epoch(3)
        assert dataset.epoch == 3

    @pytest.mark.parametrize("epoch", [-1, 1.0, True, "1"])
    def test_an_epoch_is_a_count(self, epoch: Any) -> None:
        with pytest.raises(InputError, match=r"epoch .* non-negative integer"):
            build(range(3)).set_epoch(epoch)


class TestPosition:
    @pytest.mark.processes
    def test_it_counts_what_was_handed_out(self) -> None:
        loader = build(range(24), batch_size=4, num_workers=1)
        assert loader.state_dict() == {"epoch": 0, "batches": 0, "global_batch_size": 4}
        for number, _ in enumerate(loader):
            assert loader.state_dict()["batches"] == number + 1
        assert loader.state_dict() == {"epoch": 1, "batches": 0, "global_batch_size": 4}

    def test_it_stays_when_an_iteration_is_left(self) -> None:
        loader = build(range(24), batch_size=4)
        taken(loader, 2)
        assert loader.state_dict()["batches"] == 2
        assert loader.state_dict()["epoch"] == 0

    @pytest.mark.parametrize(
        "args",
        [
            {"batch_size": 4, "shuffle": True},
            pytest.param(
                {"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True},
                marks=pytest.mark.processes,
            ),
            {"batch_size": None, "shuffle": True, "collate_fn": torch.tensor},
            {"batch_sampler": BatchSampler(DistributedSampler(range(24), 1, 0), 4, drop_last=False)},
        ],
    )
    @pytest.mark.parametrize("num_batches", [1, 4])
    def test_the_rest_and_the_epochs_after_it_are_those_of_an_unbroken_run(
        self, args: dict[str, Any], num_batches: int
    ) -> None:
        whole = build(range(24), **args)
        whole.set_epoch(1)
        expected = [listed(whole), listed(whole)]

        loader = build(range(24), **args)
        loader.set_epoch(1)
        assert taken(loader, num_batches) == expected[0][:num_batches]
        state = loader.state_dict()

        loader = build(range(24), **args)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert len(loader) == len(expected[0])
        assert listed(loader) == expected[0][num_batches:]
        assert listed(loader) == expected[1]

    def test_skipped_samples_are_never_loaded(self) -> None:
        dataset = Recorder(12)
        loader = build(dataset, batch_size=4)
        loader.load_state_dict({"epoch": 0, "batches": 2, "global_batch_size": 4})
        assert listed(loader) == [[8, 9, 10, 11]]
        assert dataset.loaded == [8, 9, 10, 11]

    def test_a_resumed_epoch_counts_on(self) -> None:
        loader = build(range(16), batch_size=4)
        loader.load_state_dict({"epoch": 3, "batches": 1, "global_batch_size": 4})
        taken(loader, 2)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (3, 3)
        assert len(listed(loader)) == 4
        assert loader.state_dict()["epoch"] == 5

    def test_the_usual_call_of_set_epoch_keeps_the_position(self) -> None:
        loader = build(range(12), batch_size=4)
        loader.load_state_dict({"epoch": 3, "batches": 2, "global_batch_size": 4})
        loader.set_epoch(3)
        assert len(listed(loader)) == 1

    def test_another_epoch_drops_it(self) -> None:
        loader = build(range(12), batch_size=4)
        loader.load_state_dict({"epoch": 3, "batches": 2, "global_batch_size": 4})
        loader.sampler.set_epoch(4)
        assert len(listed(loader)) == 3
        loader.set_epoch(3)
        assert len(listed(loader)) == 3

    def test_the_end_of_an_epoch_is_one_empty_iteration(self) -> None:
        loader = build(range(12), batch_size=4)
        loader.load_state_dict({"epoch": 0, "batches": 3, "global_batch_size": 4})
        assert listed(loader) == []
        assert len(listed(loader)) == 3

    def test_a_first_batch_that_fails_is_still_to_come(self) -> None:
        class Flaky(Recorder):
            broken = True

            def __getitem__(self, index: int) -> int:
                if self.broken:
                    raise OSError("disk")
                return index

        dataset = Flaky(12)
        loader = build(dataset, batch_size=4)
        loader.load_state_dict({"epoch": 2, "batches": 1, "global_batch_size": 4})
        with pytest.raises(OSError, match="disk"):
            next(iter(loader))
        assert loader.state_dict() == {"epoch": 2, "batches": 1, "global_batch_size": 4}
        dataset.broken = False
        assert listed(loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]

    def test_it_can_be_rewound_after_a_peek(self) -> None:
        loader = build(range(12), batch_size=4, shuffle=True)
        state = loader.state_dict()
        first = next(iter(loader)).tolist()
        loader.load_state_dict(state)
        assert listed(loader)[0] == first

    @pytest.mark.parametrize("num_ranks", [1, 2, 4])
    def test_it_carries_over_to_another_number_of_ranks(self, num_ranks: int) -> None:
        state = {"epoch": 1, "batches": 2, "global_batch_size": 4}
        expected = sorted(index for batch in epochs(2, batch_size=4, length=16)[1][2:] for index in batch)
        found = []
        for rank in range(num_ranks):
            loader = build(range(16), batch_size=4, shuffle=True, rank=rank, num_ranks=num_ranks)
            loader.load_state_dict(state)
            found += [index for batch in listed(loader) for index in batch]
        assert sorted(found) == expected

    @pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
    def test_a_stream_is_read_up_to_it(self, num_workers: int) -> None:
        parts = []
        for rank in range(2):
            loader = build(EpochStream(), batch_size=4, rank=rank, num_ranks=2, num_workers=num_workers)
            loader.load_state_dict({"epoch": 1, "batches": 2, "global_batch_size": 4})
            parts.append(listed(loader))
        assert parts == [[[108, 110]], [[109, 111]]]

    def test_a_plain_sampler_resumes_in_the_order_it_draws(self) -> None:
        def sampler() -> RandomSampler:
            return RandomSampler(range(12), generator=torch.Generator().manual_seed(3))

        expected = listed(build(range(12), sampler=sampler(), batch_size=4))
        loader = build(range(12), sampler=sampler(), batch_size=4)
        loader.load_state_dict({"epoch": 0, "batches": 1, "global_batch_size": 4})
        assert listed(loader) == expected[1:]

    @pytest.mark.parametrize(
        ("state", "said"),
        [
            ({"epoch": 0, "batches": 1, "global_batch_size": 8}, "batches of 8 samples.*has 4"),
            ({"epoch": 0}, r"lacks \['batches', 'global_batch_size'\]"),
            ({"epoch": 0, "batches": -1, "global_batch_size": 4}, "batches .* it is -1"),
            ({"epoch": "0", "batches": 1, "global_batch_size": 4}, "epoch .* it is '0'"),
        ],
    )
    def test_a_state_that_cannot_be_used(self, state: dict[str, Any], said: str) -> None:
        loader = build(range(12), batch_size=4)
        with pytest.raises(InputError, match=said):
            loader.load_state_dict(state)
        assert loader.state_dict()["batches"] == 0
