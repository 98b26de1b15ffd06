"""Nodes for tests: ranks with a store on a free port, inventories and names."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace

from atorch_ns.doctor import Who
from atorch_ns.doctor.node_findings import Inventory, Nodes

_VERSIONS = {"torch": "2.13.0", "atorch-ns": "0.1.0", "Python": "3.11.7", "devices": "CPUs"}


def all_ranks(num_nodes: int, ranks_a_node: int = 1) -> list[Who]:
    """Every rank, with a store on a free port that rank 0 keeps."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    size = num_nodes * ranks_a_node
    return [
        Who(
            rank=rank, world_size=size, local_rank=rank % ranks_a_node, local_world_size=ranks_a_node,
            host="127.0.0.1", port=port, store_is_there=False,
        )
        for rank in range(size)
    ]  # fmt: skip


def nodes_of(
    *hosts: str, last: Mapping[str, str] | None = None, address: tuple[str, int] = ("10.0.0.1", 9)
) -> Nodes:
    """Nodes of one rank each; the last one's versions and address may differ."""
    inventories = {
        rank: Inventory(host=host, versions=_VERSIONS, address=("10.0.0.1", 9))
        for rank, host in enumerate(hosts)
    }
    end = len(hosts) - 1
    inventories[end] = replace(inventories[end], versions={**_VERSIONS, **(last or {})}, address=address)
    return Nodes(all_ranks(len(hosts))[0], inventories)
