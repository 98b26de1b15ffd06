"""Cuts against brute force, their limits, and the cuts that users name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atorch_ns.errors import InputError
from atorch_ns.pipeline import custom_cuts, partition, stage_ranges, uniform_cuts, uniform_floor_cuts
from atorch_ns.pipeline.plan.partition import StageMemory

MIB = 2.0**20


def _times(costs: list[float], cuts: tuple[int, ...]) -> list[float]:
    return [sum(costs[block] for block in blocks) for blocks in stage_ranges(cuts, len(costs))]


def _bytes(memory: StageMemory, cuts: tuple[int, ...]) -> list[float]:
    spans = stage_ranges(cuts, len(memory.states))
    return [
        sum(memory.states[block] + live * memory.activations[block] for block in blocks)
        for blocks, live in zip(spans, memory.live, strict=True)
    ]


def _all_cuts(num: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(1, num), num_stages - 1)


numbers = st.integers(0, 50).map(float)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), costs=st.lists(numbers, min_size=1, max_size=9))
def test_it_equals_brute_force(data: st.DataObject, costs: list[float]) -> None:
    num = len(costs)
    num_stages = data.draw(st.integers(1, num))
    allowed = data.draw(st.one_of(st.none(), st.sets(st.integers(1, max(1, num - 1)))))
    memory = StageMemory(
        states=data.draw(st.lists(numbers, min_size=num, max_size=num)),
        activations=data.draw(st.lists(numbers, min_size=num, max_size=num)),
        live=[num_stages - stage for stage in range(num_stages)],
    )
    limit = data.draw(st.one_of(st.none(), st.integers(0, 900).map(float)))
    legal = [
        (max(times), sum(value * value for value in times))
        for cuts in _all_cuts(num, num_stages)
        if allowed is None or set(cuts) <= allowed
        if limit is None or max(_bytes(memory, cuts)) <= limit
        for times in [_times(costs, cuts)]
    ]
    if not legal:
        with pytest.raises(InputError):
            partition(costs, num_stages, memory=memory, limit=limit, allowed_cuts=allowed)
        return
    found = partition(costs, num_stages, memory=memory, limit=limit, allowed_cuts=allowed)
    times = _times(costs, found)
    assert (max(times), sum(value * value for value in times)) == min(legal)
    assert allowed is None or set(found) <= allowed
    assert limit is None or max(_bytes(memory, found)) <= limit


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=60), st.integers(2, 8))
def test_the_slowest_stage_is_never_slower_than_that_of_the_uniform_cut(
    costs: list[float], num_stages: int
) -> None:
    num_stages = min(num_stages, len(costs))
    found, uniform = partition(costs, num_stages), uniform_cuts(len(costs), num_stages)
    assert max(_times(costs, found)) <= max(_times(costs, uniform)) * (1 + 1e-12)


def test_equal_blocks_are_cut_evenly() -> None:
    assert [len(blocks) for blocks in stage_ranges(partition([1] * 10, 4), 10)] == [3, 3, 2, 2] or (
        sorted(len(blocks) for blocks in stage_ranges(partition([1] * 10, 4), 10)) == [2, 2, 3, 3]
    )


def test_a_stage_that_holds_more_micro_batches_gets_fewer_blocks() -> None:
    memory = StageMemory(states=[1.0] * 8, activations=[1.0] * 8, live=[4, 3, 2, 1])
    assert partition([1.0] * 8, 4) == (2, 4, 6)
    assert max(_bytes(memory, (2, 4, 6))) == 10
    assert partition([1.0] * 8, 4, memory=memory, limit=8.0) == (1, 3, 5)


def test_128_blocks_in_64_stages_take_less_than_a_second() -> None:
    costs = [1.0 + (block * 7919 % 13) / 13 for block in range(128)]
    memory = StageMemory(states=costs, activations=costs, live=[64 - stage for stage in range(64)])
    began = time.process_time()
    cuts = partition(costs, 64, memory=memory, limit=300.0)
    assert time.process_time() - began < 1.0
    assert len(cuts) == 63
    assert max(_bytes(memory, cuts)) <= 300.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: partition([1.0] * 3, 4),
            "4 stages need at least 4 blocks, but the model has 3. Use at most 3",
        ),
        (lambda: partition([1.0] * 3, 0), "a pipeline cannot have 0 stages"),
        (
            lambda: partition([1.0] * 6, 4, allowed_cuts={2, 4}),
            r"need 3 cuts, but the model of 6 blocks can be cut at only 2 places \(before blocks \[2, 4\]\)\. "
            "Use at most 3 stages",
        ),
        (lambda: partition([1.0, -1.0], 2), "costs must be non-negative numbers"),
        (lambda: partition([1.0, 1.0], 2, limit=3.0), "a limit needs the bytes"),
    ],
)
def test_what_cannot_be_cut_is_refused(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=words):
        call()


def test_when_nothing_fits_it_says_what_would() -> None:
    memory = StageMemory(states=[4 * MIB] * 4, activations=[2 * MIB] * 4, live=[2, 1])
    with pytest.raises(
        InputError, match=r"fits 10\.0 MiB a stage: .* 6\.00 MiB over\. .* a limit of 16\.0 MiB"
    ):
        partition([1.0] * 4, 2, memory=memory, limit=10 * MIB)
    assert partition([1.0] * 4, 2, memory=memory, limit=16 * MIB) == (2,)


@pytest.mark.parametrize("num", [4, 7, 10, 12, 31])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_uniform_cuts_differ_by_one_block(num: int, num_stages: int) -> None:
    for cuts in (uniform_cuts(num, num_stages), uniform_floor_cuts(num, num_stages)):
        sizes = [len(blocks) for blocks in stage_ranges(cuts, num)]
        assert (len(sizes), sum(sizes)) == (num_stages, num)
        assert max(sizes) - min(sizes) <= 1
    assert (
        stage_ranges(uniform_floor_cuts(num, num_stages), num)[0].stop == num // num_stages or num_stages == 1
    )


def test_uniform_cuts_keep_to_places_that_can_be_cut() -> None:
    assert uniform_cuts(8, 2, allowed_cuts=[3, 6]) == (3,)
    assert uniform_cuts(8, 2, allowed_cuts=[3, 4]) == (4,)


def test_parameters_are_cut_evenly() -> None:
    assert partition([50, 1, 1, 1, 1, 50], 3) in {(1, 5)}


def test_custom_cuts_come_with_or_without_their_ends() -> None:
    assert custom_cuts([0, 6, 12, 18, 26], 26, 4) == custom_cuts([6, 12, 18], 26, 4) == (6, 12, 18)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([0, 2, 5], r"must start with 0 and end with 6, but this one is \[0, 2, 5\]"),
        ([0, 2, 4, 6], "2 stages need 1 cuts, or 3 numbers with 0 and 6, but the partition .* has 4"),
        ([6], "cut 6 is outside of the model, whose 6 blocks can be cut at 1 to 5"),
        (
            [3],
            r"cannot be cut before block 3: it holds a list\. It can be cut before blocks 1 to 2, 4 to 5\.",
        ),
    ],
)
def test_custom_cuts_are_checked(positions: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        custom_cuts(positions, 6, 2, refused={3: "it holds a list."})


def test_everything_wrong_with_custom_cuts_is_said_together() -> None:
    with pytest.raises(InputError, match=r"cut 9 is outside.*cut 2 follows 2.*before block 2: because"):
        custom_cuts([2, 2, 9], 6, 4, refused={2: "because"})
