from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, Sampler, WeightedRandomSampler

from atorch_ns.data.build import build_dataloader
from atorch_ns.data.loader import TrainLoader
from atorch_ns.errors import BatchSizeError, RankError
from atorch_ns.testing.workers import catch_ranks, run_ranks


def build(dataset: Any, **args: Any) -> TrainLoader:
    size = dist.get_world_size()
    return build_dataloader(
        dataset,
        args=args,
        sampler_cls=None,
        seed=0,
        data_rank=dist.get_rank(),
        num_data_ranks=size,
        group=dist.group.WORLD if size > 1 else None,
    )


def listed(loader: TrainLoader) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else list(batch) for batch in loader]


def together(parts: list[list[Any]]) -> list[list[Any]]:
    """Step by step, what the ranks loaded, in the order of the global batch."""
    return [[entry for row in zip(*step, strict=True) for entry in row] for step in zip(*parts, strict=True)]


class Named(dict[str, int]):
    """A dataset whose keys are strings."""


class Failing(Sampler[int]):
    """Fails on the ranks given."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() in self.ranks:
            raise OSError("the index file is gone")
        return iter(range(4))

    def __len__(self) -> int:
        return 4


class Seeded(Sampler[int]):
    """An order of its own for each epoch, made where it is asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.length))

    def __len__(self) -> int:
        return self.length


def test_ranks_share_the_order_that_rank_0_draws() -> None:
    def job() -> Any:
        torch.manual_seed(dist.get_rank())
        loader = build(range(10), sampler=RandomSampler(range(10)), batch_size=4)
        return [listed(loader), listed(loader)], len(loader)

    results = run_ranks(job, 2)
    assert [length for _, length in results] == [3, 3]
    orders = []
    for epoch in range(2):
        batches = together([result[0][epoch] for result in results])
        assert [len(batch) for batch in batches] == [4, 4, 2]
        orders.append([index for batch in batches for index in batch])
        assert sorted(orders[-1]) == list(range(10))
    assert orders[0] != orders[1]


def test_the_batches_are_those_of_one_process() -> None:
    def job() -> Any:
        generator = torch.Generator().manual_seed(1)
        sampler = WeightedRandomSampler([1.0] * 11, num_samples=11, generator=generator)
        loader = build(range(11), sampler=sampler, batch_size=4, num_workers=1, persistent_workers=True)
        first = listed(loader)
        loader.load_state_dict({"epoch": 1, "batches": 1, "global_batch_size": 4})
        return first, listed(loader)

    alone = run_ranks(job, 1)[0]
    many = run_ranks(job, 2)
    first = together([result[0] for result in many])
    assert first[:2] == alone[0][:2]
    assert first[2] == [*alone[0][2], alone[0][0][0]]
    assert together([result[1] for result in many])[0] == alone[1][0]


def test_the_tail_is_dropped_where_asked() -> None:
    def job() -> Any:
        sampler = list(range(11))
        loader = build(range(11), sampler=sampler, batch_size=2, drop_last=True)
        return listed(loader), len(loader)

    results = run_ranks(job, 2)
    assert together([batches for batches, _ in results]) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert results[0][1] == 5


def test_keys_of_any_type_are_shared() -> None:
    def job() -> Any:
        data = Named(a=0, b=1, c=2, d=3)
        order = ["c", "a", "d", "b"] if dist.get_rank() == 0 else ["a", "b", "c", "d"]
        mixed = [True, 2**70, -1, 0]
        return listed(build(data, sampler=order, batch_size=2)), listed(
            build({key: key for key in mixed}, sampler=mixed, batch_size=4, collate_fn=list)
        )

    results = run_ranks(job, 2)
    assert together([named for named, _ in results]) == [[2, 0], [3, 1]]
    assert together([mixed for _, mixed in results]) == [[True, 2**70, -1, 0]]


def test_the_random_state_stays_in_step_on_all_ranks() -> None:
    def job() -> Any:
        torch.manual_seed(5)
        loader = build(range(8), sampler=RandomSampler(range(8)), batch_size=4)
        built = torch.equal(torch.get_rng_state(), torch.manual_seed(5).get_state())
        list(loader)
        return built, torch.rand(1).item()

    results = run_ranks(job, 2)
    assert results[0] == results[1]
    assert results[0][0]


def test_each_batch_of_a_batch_sampler_is_a_global_one() -> None:
    def job() -> Any:
        torch.manual_seed(dist.get_rank())
        batches = BatchSampler(RandomSampler(range(12)), 4, drop_last=False)
        loader = build(range(12), batch_sampler=batches)
        uneven = build(range(12), batch_sampler=[[0, 1], [2, 3, 4, 5], [6, 7]])
        return listed(loader), listed(uneven), len(uneven)

    results = run_ranks(job, 2)
    order = [index for batch in together([result[0] for result in results]) for index in batch]
    assert sorted(order) == list(range(12))
    assert together([result[1] for result in results]) == [[0, 1], [2, 3, 4, 5], [6, 7]]
    assert results[0][2] == 3


def test_every_rank_refuses_a_batch_that_cannot_be_shared() -> None:
    def job() -> None:
        # Only rank 0's batches count, and only they are wrong.
        batches = [[0, 1], [2, 3, 4 + dist.get_rank()][: 3 + dist.get_rank()]]
        list(build(range(12), batch_sampler=batches))

    outcomes = catch_ranks(job, 2, timeout_s=20)
    assert [type(outcome.error) for outcome in outcomes] == [BatchSizeError] * 2
    assert all("batch 1" in outcome.message for outcome in outcomes)


def test_a_sampler_that_fails_on_one_rank_stops_all() -> None:
    def job() -> None:
        list(build(range(4), sampler=Failing((1,)), batch_size=2))

    outcomes = catch_ranks(job, 2, timeout_s=20)
    assert isinstance(outcomes[0].error, RankError)
    assert "rank 1: OSError: the index file is gone" in outcomes[0].message
    assert isinstance(outcomes[1].error, OSError)


def test_epochs_reach_the_sampler_inside() -> None:
    def job() -> Any:
        sampler = Seeded(6)
        loader = build(range(6), sampler=sampler, batch_size=2)
        first, second = listed(loader), listed(loader)
        loader.sampler.set_epoch(0)
        again = listed(loader)
        sampler.set_epoch(1)
        return first, second, again, listed(loader)

    alone = run_ranks(job, 1)[0]
    many = run_ranks(job, 2)
    assert alone[0] == alone[2] != alone[1] == alone[3]
    assert [together([result[epoch] for result in many]) for epoch in range(4)] == list(alone)


def test_the_seed_of_rank_0s_generator_counts() -> None:
    def job() -> Any:
        generator = torch.Generator().manual_seed(40 + dist.get_rank())
        return listed(build(range(8), shuffle=True, generator=generator, batch_size=4))

    assert together(run_ranks(job, 2)) == run_ranks(job, 1)[0]


def test_a_position_carries_over_to_another_number_of_ranks() -> None:
    def job(state: dict[str, Any] | None) -> Any:
        loader = build(range(24), sampler=Seeded(24), batch_size=4)
        if state is not None:
            loader.load_state_dict(state)
            return listed(loader)
        list(loader)
        batches = [batch.tolist() for _, batch in zip(range(2), loader, strict=False)]
        return batches, loader.state_dict()

    states = [run_ranks(job, num_ranks, args=(None,))[0][1] for num_ranks in (1, 2, 4)]
    assert states == [{"epoch": 1, "batches": 2, "global_batch_size": 4}] * 3
    rests = [together(run_ranks(job, num_ranks, args=(states[0],))) for num_ranks in (1, 2, 4)]
    assert rests[0] == rests[1] == rests[2]
    assert len(rests[0]) == 4
