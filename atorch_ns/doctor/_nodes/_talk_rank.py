"""What each rank does to find out how fast it talks to others; started as a module, so that it can be ended.

After each step it writes a line with its name, by which one sees how far a rank that hangs has come.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, documented, and not in torch's __all__

from atorch_ns.doctor._measure import measure_all_reduce, measure_link, measure_product
from atorch_ns.doctor._nodes._board import open_store
from atorch_ns.doctor._who import Who

__all__ = ["main"]


def main() -> None:
    """Joins the other ranks, measures, and leaves the figures in the folder."""
    folder, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    who = Who.detect()
    assert who is not None
    limit = timedelta(seconds=timeout_s)
    store = PrefixStore("talk", open_store(who, timeout_s=timeout_s, serves=False))
    with (folder / "steps").open("a") as steps:

        def done(step: str) -> None:
            steps.write(f"{step}\n")
            steps.flush()

        done("start")
        dist.init_process_group("gloo", store=store, rank=who.rank, world_size=who.world_size, timeout=limit)
        done("join")
        found: dict[str, Any] = {"backends": {"gloo": _Talk(who, limit).measured(done)}}
        device = "cpu"
        if torch.cuda.is_available() and torch.cuda.device_count() >= who.local_world_size:
            device = "cuda"
            torch.cuda.set_device(who.local_rank)
            found["backends"]["nccl"] = _Talk(who, limit, "nccl").measured(done)
        found["product_s"] = measure_product(device)
        draft = folder / "figures.tmp"
        draft.write_text(json.dumps(found))
        draft.replace(folder / "figures")
        dist.barrier()
        dist.destroy_process_group()


class _Talk:
    """The groups of a backend: all ranks, those of this node, and the first ones of all nodes."""

    def __init__(self, who: Who, limit: timedelta, backend: str = "gloo") -> None:
        self._who, self._backend = who, backend
        first = who.node * who.local_world_size
        here = range(first, min(first + who.local_world_size, who.world_size))
        self._pair = {}
        for name, ranks in (("within", here), ("between", who.leaders)):
            if who.rank in ranks and len(ranks) > 1:
                made = {
                    kind: dist.new_group(list(ranks), limit, kind, use_local_synchronization=True)
                    for kind in sorted({"gloo", backend})
                }
                self._pair[name] = (made[backend], made["gloo"])
        everyone = None if backend == "gloo" else dist.new_group(timeout=limit, backend=backend)
        self._pair["all"] = (everyone, None)

    def measured(self, done: Any) -> dict[str, Any]:
        """All figures, in an order that is the same on every rank."""
        device = "cpu" if self._backend == "gloo" else "cuda"
        found: dict[str, Any] = {}
        for name, (group, gate) in self._pair.items():
            found[name] = measure_all_reduce(device, group, gate)
            done(f"{name} by {self._backend}")
        dist.barrier()
        found["links"] = self._links(device)
        dist.barrier()
        done(f"links by {self._backend}")
        return found

    def _links(self, device: str) -> dict[str, dict[str, float]]:
        """Of this node to its neighbours in the ring of nodes, each pair at a time of its own."""
        if "between" not in self._pair:
            return {}
        group, gate = self._pair["between"]
        num_nodes, found = self._who.num_nodes, {}
        ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)][: None if num_nodes > 2 else 1]
        # Neighbouring pairs share a node: even ones first, then odd ones, then what closes an odd ring.
        turns = [ring[0::2], ring[1::2]] if num_nodes % 2 == 0 else [ring[0:-1:2], ring[1:-1:2], ring[-1:]]
        for turn in turns:
            dist.barrier(group=gate)
            for pair in turn:
                if self._who.node in pair:
                    other = pair[0] if pair[1] == self._who.node else pair[1]
                    found[str(other)] = measure_link(device, other * self._who.local_world_size, group)
        return found


if __name__ == "__main__":
    main()
