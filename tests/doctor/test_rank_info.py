"""The launcher's environment and its store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atorch_ns.doctor import Who
from atorch_ns.doctor.rank_info import open_store
from atorch_ns.errors import BackendError
from tests.doctor.nodes import all_ranks


def test_who_is_read_from_the_launcher() -> None:
    assert Who.detect({}) is None
    last = all_ranks(2, 2)[3]
    assert (last.node, last.num_nodes, last.leads, last.leaders) == (1, 2, False, (0, 2))
    assert list(last.ranks_of(1)) == [2, 3]
    assert Who.detect(last.variables()) == last
    with pytest.raises(BackendError, match="lacks MASTER_ADDR"):
        Who.detect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})


def test_a_store_that_is_not_there() -> None:
    (who,) = all_ranks(1)
    with pytest.raises(BackendError, match=rf"rank 1 on node 1 cannot reach .* 127\.0\.0\.1:{who.port}"):
        open_store(replace(who, rank=1, world_size=2), timeout_s=1)
