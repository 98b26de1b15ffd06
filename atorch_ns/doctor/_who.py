"""Which rank this is, on which node, as the launcher says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from atorch_ns.errors import BackendError

__all__ = ["Who"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Who:
    """A rank among those that a launcher has started; every node has equally many.

    Attributes:
        rank: of all.
        world_size: ranks on all nodes.
        local_rank: on its node.
        local_world_size: ranks on its node.
        host: address of the launcher's store.
        port: of the store.
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
    def detect(given: Mapping[str, str] = os.environ) -> Who | None:
        """From the variables of torchrun and its like; ``None`` where nobody has started ranks.

        Raises:
            BackendError: if some of the variables are missing.
        """
        if "RANK" not in given and "WORLD_SIZE" not in given:
            return None
        missing = [name for name in _NEEDED if name not in given]
        if missing:
            raise BackendError(
                f"the environment names ranks but lacks {', '.join(missing)}. Start doctor with torchrun, or unset RANK "
                "and WORLD_SIZE to look at this machine alone."
            )
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        return Who(
            rank=rank,
            world_size=world_size,
            local_rank=int(given.get("LOCAL_RANK", 0)),
            local_world_size=int(given.get("LOCAL_WORLD_SIZE", 1)),
            host=given["MASTER_ADDR"],
            port=int(given["MASTER_PORT"]),
            store_is_there=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
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
        """The number of this rank's node; torchrun gives a node's ranks numbers in a row."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Nodes that take part."""
        return -(-self.world_size // self.local_world_size)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node, which speaks for it."""
        return self.rank % self.local_world_size == 0

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every node."""
        return tuple(range(0, self.world_size, self.local_world_size))
