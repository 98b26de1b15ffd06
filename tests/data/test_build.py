from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from atorch_ns.data.build import build_dataloader
from atorch_ns.data.loader import TrainLoader
from atorch_ns.data.loader_args import KNOWN_KEYS
from atorch_ns.errors import BatchSizeError, InputError


def build(
    dataset: Any, /, *, rank: int = 0, num_ranks: int = 1, sampler_cls: Any = None, seed: int = 0, **args: Any
) -> TrainLoader:
    return build_dataloader(
        dataset,
        args=args,
        sampler_cls=sampler_cls,
        seed=seed,
        data_rank=rank,
        num_data_ranks=num_ranks,
        group=None,
    )


def listed(loader: TrainLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(loader: TrainLoader) -> list[int]:
    return [index for batch in listed(loader) for index in batch]


class Stream(IterableDataset[int]):
    """0, 1, 2 … divided among the loader's workers as torch's documentation does it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(100 * self.epoch + begin, 100 * self.epoch + self.length, step))


class Ranged(IterableDataset[int]):
    """A stream that a ``worker_init_fn`` divides by setting attributes, torch's other way."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, self.end))


def divide(worker_id: int) -> None:
    info = get_worker_info()
    dataset: Any = info.dataset
    half = (dataset.end - dataset.begin) // info.num_workers
    dataset.begin += worker_id * half
    dataset.end = dataset.begin + half


class TestBatchSize:
    def test_it_is_global(self) -> None:
        loader = build(range(32), batch_size=8, rank=1, num_ranks=4)
        assert loader.batch_size == 2
        assert loader.global_batch_size == 8
        assert len(loader) == 4

    @pytest.mark.parametrize(("num_ranks", "size"), [(1, 1), (4, 4)])
    def test_without_one_each_rank_loads_one_sample(self, num_ranks: int, size: int) -> None:
        loader = build_dataloader(
            range(8), args=None, sampler_cls=None, seed=0, data_rank=0, num_data_ranks=num_ranks, group=None
        )
        assert loader.batch_size == 1
        assert loader.global_batch_size == size

    def test_one_that_does_not_divide_names_the_nearest(self) -> None:
        with pytest.raises(
            BatchSizeError, match=r"'batch_size'\]=10 .* 4 data-parallel ranks.* are 8 and 12"
        ):
            build(range(32), batch_size=10, num_ranks=4)
        with pytest.raises(BatchSizeError, match="nearest size that divides is 4"):
            build(range(32), batch_size=3, num_ranks=4)

    def test_none_turns_batching_off_for_one_rank_only(self) -> None:
        assert [int(item) for item in build(range(3), batch_size=None)] == [0, 1, 2]
        with pytest.raises(InputError, match="no global batch that 2"):
            build(range(3), batch_size=None, num_ranks=2)


class TestBadArguments:
    def test_all_problems_are_reported_together(self) -> None:
        with pytest.raises(InputError) as caught:
            build(range(8), batchsize=4, shufle=True, batch_size=3, drop_last="yes", num_ranks=2)
        text = str(caught.value)
        assert "Did you mean 'batch_size'" in text
        assert "Did you mean 'shuffle'" in text
        assert "drop_last" in text
        assert "are 2 and 4" in text
        assert not isinstance(caught.value, BatchSizeError)

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ({"dataset": [1]}, "argument of its own"),
            ({"batch_size": 0}, "positive integer"),
            ({"batch_size": True}, "positive integer"),
            ({"generator": 5}, "torch.Generator; it is an int"),
            ({"sampler": 5}, "must be iterable"),
            ({"sampler": iter([1])}, "empty after one epoch"),
            ({"sampler": [1], "shuffle": True}, "leave out shuffle"),
            ({"batch_sampler": [[1]], "batch_size": 2, "drop_last": True}, "leave out batch_size, drop_last"),
            ({"batch_size": None, "drop_last": True}, "leave out drop_last"),
            ({"num_workers": -1}, "num_workers"),
            ({"num_workers": 0, "persistent_workers": True}, "persistent_workers"),
            ({"num_workers": "two"}, "torch refuses"),
        ],
    )
    def test_each_is_named(self, args: dict[str, Any], said: str) -> None:
        with pytest.raises(InputError, match=said):
            build(range(8), **args)

    def test_the_arguments_known_are_those_of_torch(self) -> None:
        parameters = list(inspect.signature(DataLoader.__init__).parameters)
        assert sorted(KNOWN_KEYS) == sorted(set(parameters) - {"self", "dataset"})

    def test_arguments_that_are_no_mapping(self) -> None:
        with pytest.raises(InputError, match="must be a dictionary; it is a list"):
            build_dataloader(
                range(8), args=[1], sampler_cls=None, seed=0, data_rank=0, num_data_ranks=1, group=None
            )

    @pytest.mark.parametrize("dataset", [None, DataLoader([1]), iter([1]), 5, {1}.__len__])
    def test_what_is_no_dataset(self, dataset: Any) -> None:
        with pytest.raises(InputError, match="dataset"):
            build(dataset)

    def test_a_dataset_without_length_needs_a_sampler(self) -> None:
        class Endless(Dataset[int]):
            def __getitem__(self, index: int) -> int:
                return index

        with pytest.raises(InputError, match="has no __len__"):
            build(Endless())
        assert flat(build(Endless(), sampler=[5, 3])) == [5, 3]


class TestOrder:
    def test_nothing_of_the_caller_changes(self) -> None:
        generator = torch.Generator().manual_seed(7)
        state, rng = generator.get_state(), torch.get_rng_state()
        args = {"batch_size": 4, "shuffle": True, "generator": generator}
        before = dict(args)
        loader = build_dataloader(
            range(16), args=args, sampler_cls=None, seed=0, data_rank=0, num_data_ranks=1, group=None
        )
        assert torch.equal(torch.get_rng_state(), rng)
        list(loader)
        assert args == before
        assert torch.equal(generator.get_state(), state)

    def test_a_generator_gives_the_seed(self) -> None:
        orders = [
            flat(build(range(16), shuffle=True, generator=torch.Generator().manual_seed(7), seed=seed))
            for seed in (1, 2)
        ]
        assert orders[0] == orders[1] == flat(build(range(16), shuffle=True, seed=7))
        assert orders[0] != flat(build(range(16), shuffle=True, seed=1))

    def test_without_shuffle_it_is_that_of_the_dataset(self) -> None:
        assert listed(build(range(5), batch_size=2)) == [[0, 1], [2, 3], [4]]

    def test_other_arguments_reach_torch(self) -> None:
        loader = build(range(4), batch_size=2, collate_fn=tuple, timeout=0, in_order=True)
        assert list(loader) == [(0, 1), (2, 3)]


class PlainSampler:
    """The interface of DistributedSampler without ``seed`` and ``drop_last``."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, shuffle: bool) -> None:
        self.made_with = (num_replicas, rank, shuffle)
        self.indices = range(rank, len(dataset), num_replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class TestSamplers:
    def test_a_class_is_made_with_what_it_takes(self) -> None:
        loader = build(range(8), sampler_cls=PlainSampler, batch_size=2, shuffle=True, num_ranks=2, rank=1)
        assert loader.sampler.made_with == (2, 1, True)
        assert flat(loader) == [1, 3, 5, 7]

        class Greedy(DistributedSampler):
            pass

        loader = build(range(9), sampler_cls=Greedy, seed=4, drop_last=True, batch_size=2, num_ranks=2)
        assert (loader.sampler.seed, loader.sampler.drop_last) == (4, True)

    def test_a_class_is_used_for_one_rank_too(self) -> None:
        assert build(range(8), sampler_cls=PlainSampler).sampler.made_with == (1, 0, False)

    def test_a_class_that_cannot_be_made(self) -> None:
        class Narrow:
            def __init__(self, dataset: Any) -> None:
                pass

        with pytest.raises(InputError, match=r"distributed_sampler_cls=Narrow .*num_replicas=1"):
            build(range(8), sampler_cls=Narrow)

    @pytest.mark.parametrize("key", ["sampler", "batch_sampler"])
    def test_a_class_beside_a_sampler(self, key: str) -> None:
        with pytest.raises(InputError, match=f"distributed_sampler_cls and .*{key}"):
            build(range(8), sampler_cls=PlainSampler, **{key: [[0]]})

    def test_one_rank_leaves_samplers_untouched(self) -> None:
        sampler = SequentialSampler(range(8))
        assert build(range(8), sampler=sampler).sampler is sampler
        batch_sampler = BatchSampler(sampler, 3, drop_last=False)
        loader = build(range(8), batch_sampler=batch_sampler)
        assert loader.batch_sampler is batch_sampler
        assert listed(loader) == [[0, 1, 2], [3, 4, 5], [6, 7]]
        assert loader.global_batch_size is None

    def test_a_distributed_sampler_must_be_that_of_this_rank(self) -> None:
        sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
        loader = build(range(8), sampler=sampler, batch_size=4, num_ranks=2, rank=1)
        assert loader.sampler is sampler
        assert listed(loader) == [[1, 3], [5, 7]]
        with pytest.raises(InputError, match=r"\(2, 1\).*\(1, 0\)"):
            build(range(8), sampler=sampler)

    def test_a_batch_sampler_over_a_distributed_sampler_is_already_a_share(self) -> None:
        inner = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
        batches = BatchSampler(inner, 2, drop_last=False)
        assert listed(build(range(8), batch_sampler=batches, num_ranks=2, rank=1)) == [[1, 3], [5, 7]]
        with pytest.raises(InputError, match=r"\(2, 1\).*\(2, 0\)"):
            build(range(8), batch_sampler=batches, num_ranks=2, rank=0)

    def test_another_sampler_needs_the_group(self) -> None:
        with pytest.raises(InputError, match="initialised"):
            build(range(8), sampler=RandomSampler(range(8)), num_ranks=2, batch_size=2)


class TestStreams:
    def test_one_rank_gets_the_dataset_itself(self) -> None:
        dataset = Stream(5)
        loader = build(dataset, batch_size=2)
        assert loader.dataset is dataset
        assert listed(loader) == [[0, 1], [2, 3], [4]]

    def test_ranks_share_complete_rounds(self) -> None:
        parts = [listed(build(Stream(11), batch_size=4, num_ranks=2, rank=rank)) for rank in range(2)]
        assert parts == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.processes
    def test_workers_and_epochs(self, persistent: bool) -> None:
        epochs = [[], []]
        for rank in range(2):
            loader = build(
                Stream(12), batch_size=4, num_ranks=2, rank=rank, num_workers=2, persistent_workers=persistent
            )
            epochs[0] += flat(loader)
            epochs[1] += flat(loader)
        assert sorted(epochs[0]) == list(range(12))
        assert sorted(epochs[1]) == list(range(100, 112))

    @pytest.mark.processes
    def test_a_worker_init_function_reaches_the_dataset(self) -> None:
        taken = []
        for rank in range(2):
            loader = build(
                Ranged(0, 12), batch_size=2, num_ranks=2, rank=rank, num_workers=2, worker_init_fn=divide
            )
            assert loader.dataset.end == 12
            taken += flat(loader)
        assert sorted(taken) == list(range(12))

    def test_a_share_survives_pickling(self) -> None:
        # As it must for workers that are spawned.
        share = build(Ranged(0, 6), num_ranks=2, rank=1).dataset
        copied = pickle.loads(pickle.dumps(share))
        copied.end = 4
        assert (list(copied), list(share)) == ([1, 3], [1, 3, 5])

    @pytest.mark.processes
    def test_one_rank_with_persistent_workers_hears_of_epochs(self) -> None:
        loader = build(Stream(3), num_workers=1, persistent_workers=True)
        assert [flat(loader), flat(loader)] == [[0, 1, 2], [100, 101, 102]]

    @pytest.mark.processes
    def test_persistent_workers_hear_what_the_dataset_is_told_here(self) -> None:
        dataset = Stream(4)
        loader = build(dataset, num_ranks=2, batch_size=2, num_workers=1, persistent_workers=True)
        flat(loader)
        dataset.set_epoch(7)
        assert flat(loader) == [700, 702]

    def test_any_iterable_that_starts_anew_is_a_dataset(self) -> None:
        loader = build({3: None}.keys())
        assert [flat(loader), flat(loader)] == [[3], [3]]

    @pytest.mark.parametrize(
        "args", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}, {"sampler_cls": PlainSampler}]
    )
    def test_its_order_is_its_own(self, args: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="iterable dataset"):
            build(Stream(4), **args)

    def test_the_length_is_that_of_the_share(self) -> None:
        class Sized(Stream):
            def __len__(self) -> int:
                return self.length

        loader = build(Sized(11), batch_size=4, num_ranks=2)
        assert len(loader) == len(listed(loader)) == 3
        with pytest.raises(TypeError, match="has no __len__"):
            len(build(Stream(11), num_ranks=2))
