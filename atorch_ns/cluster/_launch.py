"""Joining the process group that a launcher such as torchrun describes."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from atorch_ns.cluster._cluster import Cluster
from atorch_ns.cluster._generation import agree_on_generation, keeps_stores
from atorch_ns.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch leaves it out of __all__

__all__ = ["join_process_group"]

_SETTLING_S = 0.2
_JOINING_S = 600.0

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_process_group(cluster: Cluster) -> None:
    """Initialises ``torch.distributed`` if a launcher asked for it and nobody has done so yet.

    Uses gloo for CPU tensors and NCCL for CUDA tensors. A process group that is made here is left in order
    at the end of the interpreter; one that the caller made stays the caller's.

    Raises:
        BackendError: if the launcher's environment is incomplete or the other processes cannot be reached.
    """
    import torch
    import torch.distributed as dist

    if not cluster.distributed or dist.is_initialized():
        return
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise BackendError(
            f"the environment names a process group but lacks {', '.join(missing)}. Start the script with "
            "torchrun, or unset RANK and WORLD_SIZE to run one process."
        )
    backend = "gloo"
    if cluster.device_type == "cuda":
        torch.cuda.set_device(cluster.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        if keeps_stores():
            dist.init_process_group(
                backend, store=_own_store(cluster), rank=cluster.rank, world_size=cluster.world_size
            )
        else:
            dist.init_process_group(backend)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise BackendError(
            f"rank {cluster.rank} of {cluster.world_size} could not join the process group at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} with {backend}: {error}"
        ) from error
    atexit.register(_leave)


def _own_store(cluster: Cluster) -> Store:
    """The launcher's store, for the keys of this generation of workers alone."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch leaves it out of __all__

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_JOINING_S),
    )
    name = agree_on_generation(store, cluster.rank, cluster.world_size, _JOINING_S)
    return PrefixStore(name, store)


def _leave() -> None:
    """Leaves the process group and lets its threads come to rest before the interpreter goes.

    A thread of the backend that still holds a tensor of the last collective needs the interpreter lock to
    release it. Once the interpreter is finalising, asking for the lock ends the thread, and with it the
    process ("terminate called without an active exception"). Sleeping hands the lock over in time.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(_SETTLING_S)
