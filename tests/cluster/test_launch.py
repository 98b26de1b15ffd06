"""Leaving a process group in order, at the end of the interpreter."""

from __future__ import annotations

import os
import subprocess

from atorch_ns.testing import reserve_port
from tests.warm import COLD_PYTHON

# Rank 0 keeps the interpreter lock until it ends, while its collective ends and one of the backend's threads
# asks for the lock to release the tensor.
SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from atorch_ns.cluster import Cluster, join_process_group

cluster = Cluster.detect()
join_process_group(cluster)
if cluster.rank == 0:
    dist.all_reduce(torch.ones(1000), async_op=True)
    sys.setswitchinterval(100)
    end = time.perf_counter() + 2.0
    while time.perf_counter() < end:
        pass
else:
    time.sleep(0.7)
    dist.all_reduce(torch.ones(1000))
    time.sleep(2.5)
"""


def test_a_busy_backend_does_not_abort_the_interpreter_at_its_end() -> None:
    """A thread that asks for the lock of an interpreter that is going ends the process with SIGABRT."""
    with reserve_port() as port:
        ranks = [
            subprocess.Popen(
                [COLD_PYTHON, "-c", SCRIPT],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
