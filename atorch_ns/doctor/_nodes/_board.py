"""Where ranks leave notes for each other; nobody waits for a note longer than was agreed."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, documented, and not in torch's __all__

from atorch_ns.doctor._who import Who
from atorch_ns.errors import BackendError

__all__ = ["Board", "open_store"]

_PREFIX: Final = "atorch_ns/doctor"
_POLL_S: Final = 0.05
_BEAT_S: Final = 1.0
_FAREWELL_S: Final = 5.0
_BROKEN: Final = "broken"


def open_store(who: Who, *, timeout_s: float, serves: bool) -> Any:
    """The launcher's store.

    Args:
        who: this rank.
        timeout_s: seconds to reach it.
        serves: whether this process keeps the store, if it is rank 0 and the launcher keeps none.

    Raises:
        BackendError: if it cannot be reached.
    """
    keeps = serves and who.rank == 0 and not who.store_is_there
    try:
        store = TCPStore(
            who.host,
            who.port,
            is_master=keeps,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackendError(
            f"rank {who.rank} on node {who.node} cannot reach the launcher's store at {who.host}:{who.port} within "
            f"{timeout_s:.0f} s: {reason}. Check on this node that the name resolves and that no firewall drops the "
            f"connection: getent hosts {who.host}; nc -vz {who.host} {who.port}"
        ) from error
    return PrefixStore(_PREFIX, store)


class Board:
    """Notes, plain values, by subject and rank. Rank 0 lets the others see that it still runs.

    Args:
        who: this rank.
        timeout_s: seconds to reach the store, and that a rank waits for one that gives no sign of life.

    Raises:
        BackendError: if the store cannot be reached.
    """

    def __init__(self, who: Who, *, timeout_s: float) -> None:
        self._who, self._timeout_s = who, timeout_s
        self._store = open_store(who, timeout_s=timeout_s, serves=True)
        self._left = threading.Event()
        if who.rank == 0:
            # A store's connection is for one thread.
            pulse = open_store(who, timeout_s=timeout_s, serves=False)
            threading.Thread(target=self._beat, args=(pulse,), daemon=True).start()

    def post(self, subject: str, value: Any) -> None:
        """Leaves this rank's note."""
        self._store.set(f"{subject}/{self._who.rank}", json.dumps(value))

    def gather(self, subject: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, Any]:
        """The notes of those ranks that left one in time."""
        found: dict[int, Any] = {}
        waited_for = list(ranks)
        limit = time.monotonic() + timeout_s
        while True:
            there = [rank for rank in waited_for if self._store.check([f"{subject}/{rank}"])]
            for rank in there:
                found[rank] = json.loads(self._store.get(f"{subject}/{rank}"))
            waited_for = [rank for rank in waited_for if rank not in found]
            if not waited_for or time.monotonic() > limit:
                return found
            time.sleep(_POLL_S)

    def read(self, subject: str) -> Any:
        """Rank 0's note, however long it takes while rank 0 lives.

        Raises:
            BackendError: if rank 0 has failed, or gives no sign of life.
        """
        key = f"{subject}/0"
        seen, since = -1, time.monotonic()
        while not self._store.check([key]):
            beat = self._store.add("beat", 0)
            if beat != seen:
                seen, since = beat, time.monotonic()
            quiet_s = time.monotonic() - since
            if self.sees_flag(_BROKEN) or quiet_s > self._timeout_s:
                why = "has failed" if self.sees_flag(_BROKEN) else f"has been silent for {quiet_s:.0f} s"
                raise BackendError(
                    f"rank 0, on node 0, {why}. Look at that node: what it printed, and whether it still runs."
                )
            time.sleep(_POLL_S)
        return json.loads(self._store.get(key))

    def give_up(self) -> None:
        """Tells the others that rank 0 has failed."""
        with contextlib.suppress(dist.DistError):
            self.raise_flag(_BROKEN)

    def raise_flag(self, name: str) -> None:
        """Lets every rank that looks see it."""
        self._store.set(f"flag/{name}", "1")

    def sees_flag(self, name: str) -> bool:
        """Whether some rank has raised it; does not wait."""
        return bool(self._store.check([f"flag/{name}"]))

    def leave(self) -> None:
        """Says goodbye; the rank that keeps the store waits a moment for the others to do so."""
        self._left.set()
        with contextlib.suppress(dist.DistError):  # whoever keeps the store may have left before
            self.post("goodbye", True)
            if self._who.rank == 0 and not self._who.store_is_there:
                self.gather("goodbye", range(self._who.world_size), timeout_s=_FAREWELL_S)

    def _beat(self, store: Any) -> None:
        with contextlib.suppress(dist.DistError):
            while not self._left.wait(_BEAT_S):
                store.add("beat", 1)
