"""Generations of an elastic job that share one store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch leaves it out of __all__

from atorch_ns.cluster.process_group import agree_on_generation, keeps_stores


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def _client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))


def _generation(server: TCPStore, ranks: list[int], world_size: int, timeout_s: float = 20.0) -> list[object]:
    """What each rank comes to: the name, or the error."""

    def join(rank: int) -> object:
        try:
            return agree_on_generation(_client(server), rank, world_size, timeout_s)
        except TimeoutError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(join, ranks))


def test_each_generation_has_a_name_of_its_own(server: TCPStore) -> None:
    names = [_generation(server, list(range(size)), size) for size in (3, 2, 4, 1)]
    assert all(len(set(found)) == 1 for found in names)
    assert len({found[0] for found in names}) == 4


@pytest.mark.parametrize("came", [[0], [0, 1], [1, 2], [0, 2]])
def test_words_of_dead_ranks_are_read_by_nobody(server: TCPStore, came: list[int]) -> None:
    dead = _generation(server, came, 3, timeout_s=0.3)
    assert "did not come" in str(dead[0])
    assert str(dead[0]) == ("rank 0 did not come" if came[0] else dead[0])
    for size in (3, 2):
        names = _generation(server, list(range(size)), size)
        assert len(set(names)) == 1
        assert names[0] not in dead


def test_the_ranks_that_did_not_come_are_named(server: TCPStore) -> None:
    (error,) = _generation(server, [0], 3, timeout_s=0.2)
    assert error == "rank(s) 1, 2 did not come"


def test_only_a_store_that_outlives_its_workers_is_shared() -> None:
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert keeps_stores(elastic)
    assert not keeps_stores({**elastic, "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert not keeps_stores({**elastic, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not keeps_stores({})
