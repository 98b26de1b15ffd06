"""Process group of a launcher such as torchrun: joining, leaving, and a store for each elastic generation.

torchrun's agents keep one TCPStore for all generations of workers. torch's rendezvous stores the keys of each
process group in it under the same names. A rank of a new generation may then read the address of a dead one
("Connection refused"), until no restarts are left. torchrun gives workers no value that identifies a
generation: each agent counts restarts itself. So the ranks agree on a name.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from atorch_ns.cluster.cluster import Cluster
from atorch_ns.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch leaves it out of __all__

_PREFIX: Final = "atorch_ns/generation"
_POLL_S: Final = 0.02


def keeps_stores(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the launcher's store outlives its workers."""
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def agree_on_generation(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Returns a name of this generation, shared by all its ranks and by no others. Collective.

    Every rank writes a random token under its rank, over a dead one's. Rank 0 answers each token with the
    generation's name until every rank has acknowledged an answer to its own: answers to dead tokens are never
    read. All workers of earlier generations have ended before torchrun starts new ones.

    Raises:
        TimeoutError: naming the ranks that did not arrive.
    """
    limit = time.monotonic() + timeout_s
    if rank == 0:
        name = uuid.uuid4().hex
        _answer_ranks(store, name, range(1, world_size), limit)
        return name
    token = uuid.uuid4().hex
    store.set(f"{_PREFIX}/token/{rank}", token)
    answer = f"{_PREFIX}/answer/{token}"
    while not store.check([answer]):
        _wait_or_time_out(limit, "rank 0")
    generation: str = store.get(answer).decode()
    store.set(f"{_PREFIX}/{generation}/{rank}", "")
    return generation


def _answer_ranks(store: Store, name: str, ranks: Iterable[int], limit: float) -> None:
    waiting, tokens = set(ranks), set[str]()
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"{_PREFIX}/{name}/{rank}"]):  # the rank has read its answer
                waiting.discard(rank)
            elif store.check([f"{_PREFIX}/token/{rank}"]):  # the token may be of a dead rank
                token = store.get(f"{_PREFIX}/token/{rank}").decode()
                if token not in tokens:
                    tokens.add(token)
                    store.set(f"{_PREFIX}/answer/{token}", name)
        if waiting:
            _wait_or_time_out(limit, "rank(s) " + ", ".join(map(str, sorted(waiting)[:8])))


def _wait_or_time_out(limit: float, whom: str) -> None:
    if time.monotonic() > limit:
        raise TimeoutError(f"{whom} did not come")
    time.sleep(_POLL_S)


_SETTLING_S = 0.2
_JOINING_S = 600.0

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_process_group(cluster: Cluster) -> None:
    """Initialises ``torch.distributed`` if a launcher started this process and it is not initialised yet.

    Uses gloo for CPU tensors and NCCL for CUDA tensors. A process group that is made here is destroyed
    at the end of the interpreter; one that the caller made is not, but what it has begun may end.

    Raises:
        BackendError: if the launcher's environment is incomplete or the other processes cannot be reached.
    """
    import torch
    import torch.distributed as dist

    if not cluster.distributed:
        return
    _settle_at_exit()  # registered first, so that it runs last
    if dist.is_initialized():
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
        backend = "cpu:gloo,cuda:nccl"  # CPU tensors and objects go by gloo
    try:
        ranks: dict[str, Any] = {"rank": cluster.rank, "world_size": cluster.world_size}
        dist.init_process_group(backend, **(ranks | {"store": _own_store(cluster)} if keeps_stores() else {}))
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise BackendError(
            f"rank {cluster.rank} of {cluster.world_size} could not join the process group at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} with {backend}: {error}"
        ) from error
    atexit.register(_leave_process_group)


def _own_store(cluster: Cluster) -> Store:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_JOINING_S),
    )
    name = agree_on_generation(store, cluster.rank, cluster.world_size, _JOINING_S)
    return PrefixStore(name, store)  # prefixes the keys of this generation


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@cache
def _settle_at_exit() -> None:
    # A thread of the backend that still holds a tensor needs the interpreter lock to release it. Once the
    # interpreter finalises, waiting for the lock ends the process. Sleeping hands over the lock in time.
    atexit.register(time.sleep, _SETTLING_S)
