"""Launcher's environment: rank, node and store address of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from atorch_ns.errors import BackendError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Who:
    """A rank among those that a launcher has started; every node has equally many.

    Attributes:
        rank: number among all ranks.
        world_size: ranks on all nodes.
        local_rank: number among the ranks of its node.
        local_world_size: ranks on its node.
        host: address of the launcher's store.
        port: port of the launcher's store.
        store_is_there: the launcher keeps the store; else rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    store_is_there: bool

    @staticmethod
    def detect(environ: Mapping[str, str] = os.environ) -> Who | None:
        """Reads the variables of torchrun and its like; ``None`` where no launcher has started ranks.

        Raises:
            BackendError: if some of the variables are missing.
        """
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return None
        missing = [name for name in _NEEDED if name not in environ]
        if missing:
            raise BackendError(
                f"the environment names ranks but lacks {', '.join(missing)}. Start doctor with torchrun, or unset RANK "
                "and WORLD_SIZE to look at this machine alone."
            )
        return Who(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            store_is_there=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",  # set by torchrun
        )

    def variables(self) -> dict[str, str]:
        """The launcher's variables, from which :meth:`detect` makes the same."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store_is_there),
        }

    @property
    def node(self) -> int:
        """The number of this rank's node; torchrun gives a node's ranks consecutive numbers."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Nodes that take part."""
        return -(-self.world_size // self.local_world_size)  # rounded up

    @property
    def leads(self) -> bool:
        """True if this is the first rank of its node, which reports for it."""
        return self.rank % self.local_world_size == 0

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every node."""
        return tuple(range(0, self.world_size, self.local_world_size))

    def ranks_of(self, node: int) -> range:
        """The ranks on a node."""
        first = node * self.local_world_size
        return range(first, min(first + self.local_world_size, self.world_size))


def open_store(who: Who, *, timeout_s: float) -> Any:
    """The launcher's store; rank 0 starts it where the launcher keeps none.

    Raises:
        BackendError: if this rank (``who``) cannot reach it within ``timeout_s``.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented; not in __all__

    try:
        return TCPStore(
            who.host,
            who.port,
            is_master=who.rank == 0 and not who.store_is_there,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # a rank that is missing is named, not waited for
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackendError(
            f"rank {who.rank} on node {who.node} cannot reach the launcher's store at {who.host}:{who.port} within "
            f"{timeout_s:.0f} s: {reason}. Check on this node that the name resolves and that no firewall drops the "
            f"connection: getent hosts {who.host}; nc -vz {who.host} {who.port}"
        ) from error
