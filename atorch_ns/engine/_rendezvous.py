"""Where the ranks of a trial find each other."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch leaves it out of __all__

    from atorch_ns.cluster import Cluster

__all__ = ["Rendezvous", "open_rendezvous"]

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 4096
_TIMEOUT: Final = timedelta(seconds=60)


@dataclass(frozen=True)
class Rendezvous:
    """The address of the store that rank 0 keeps; every trial uses keys of its own in it."""

    host: str
    port: int


def open_rendezvous(cluster: Cluster) -> tuple[Store, Rendezvous]:
    """Starts the store; called on rank 0 only.

    It listens on loopback where all ranks are on one node, else on all interfaces.

    Returns:
        The store, which lives until it is let go of, and its address for all ranks.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch leaves it out of __all__

    one_node = cluster.num_nodes == 1
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_LOOPBACK if one_node else "", 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        # The address that the launcher gave all ranks reaches this one.
        host = _LOOPBACK if one_node else os.environ.get("MASTER_ADDR", socket.gethostname())
        store: Store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store closes it
    finally:
        listener.close()
    return store, Rendezvous(host, port)
