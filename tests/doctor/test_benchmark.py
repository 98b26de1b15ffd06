"""Groups of ranks whose all-reduces are measured."""

from __future__ import annotations

import itertools

import pytest

from atorch_ns.doctor.benchmark import _plan_rounds, _time_repeats
from tests.doctor.nodes import all_ranks


@pytest.mark.parametrize(("num_nodes", "ranks_a_node"), [(2, 1), (3, 2), (4, 2), (5, 1)])
def test_groups_of_a_round_share_no_rank(num_nodes: int, ranks_a_node: int) -> None:
    for _, groups in _plan_rounds(all_ranks(num_nodes, ranks_a_node)[0]):
        ranks = list(itertools.chain(*groups))
        assert len(ranks) == len(set(ranks))


@pytest.mark.parametrize(("num_nodes", "num_links"), [(2, 1), (3, 3), (4, 4), (5, 5)])
def test_every_node_is_linked_to_its_neighbours_in_a_ring(num_nodes: int, num_links: int) -> None:
    rounds = _plan_rounds(all_ranks(num_nodes)[0])
    links = [set(pair) for name, groups in rounds if name == "links" for pair in groups]
    assert len(links) == num_links
    assert all({node, (node + 1) % num_nodes} in links for node in range(num_nodes))


def test_one_node_measures_no_links() -> None:
    assert [name for name, _ in _plan_rounds(all_ranks(1, 4)[0])] == ["all"]
    assert [name for name, _ in _plan_rounds(all_ranks(2, 2)[0])] == ["all", "within", "between", "links"]


def test_the_first_time_is_left_out() -> None:
    calls: list[str] = []
    times = _time_repeats(lambda: calls.append("action"), "cpu", before=lambda: calls.append("before"))
    assert len(times) == 5
    assert calls == ["before", "action"] * 6
