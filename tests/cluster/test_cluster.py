"""What is read from the environment, and how an incomplete one is answered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atorch_ns.cluster import Cluster, join_process_group
from atorch_ns.errors import BackendError


def test_a_plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cluster = Cluster.detect()
    assert (cluster.world_size, cluster.rank, cluster.distributed) == (1, 0, False)
    assert cluster.num_nodes == 1
    assert cluster.device == cluster.device_type or cluster.device == "cuda:0"
    assert "transformers" in cluster.packages
    join_process_group(cluster)  # does nothing


def test_a_launched_process(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster.detect()
    assert (cluster.world_size, cluster.rank, cluster.local_rank) == (8, 5, 1)
    assert cluster.num_nodes == 2
    assert cluster.distributed


def test_an_incomplete_environment_is_an_error_and_not_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match="lacks RANK, MASTER_ADDR, MASTER_PORT"):
        join_process_group(Cluster.detect())
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(BackendError, match="WORLD_SIZE='two'"):
        Cluster.detect()


def test_threads_of_a_process_group_of_the_callers_may_end_before_the_interpreter_does() -> None:
    script = """
import atexit, os, time
import torch.distributed as dist
from atorch_ns.cluster import Cluster, join_process_group

os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
atexit.register(lambda: print(f"{time.monotonic() - ended:.3f}"))
for _ in range(2):  # two jobs wait once
    join_process_group(Cluster.detect())
ended = time.monotonic()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout) >= 0.2, done.stderr
