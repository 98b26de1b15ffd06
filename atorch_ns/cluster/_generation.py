"""A store for one generation of an elastic job.

torchrun's agents keep one TCPStore for all generations of their workers, and torch's own rendezvous puts the keys of
each process group into it under the same names. A rank of a new generation may so read the address that a dead one
left there ("Connection refused"), until the restarts are used up. Nothing that torchrun tells its workers is the same
for all of a generation and of no other: the count of restarts is each agent's own. So the ranks agree on a name.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch leaves it out of __all__

__all__ = ["agree_on_generation", "keeps_stores"]

_PREFIX: Final = "atorch_ns/generation"
_POLL_S: Final = 0.02


def keeps_stores(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher's store lives on when the workers are started again."""
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def agree_on_generation(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A name that the ranks of this generation have in common, and no others; collective.

    Every rank writes a word of its own where dead ones may have left theirs. Rank 0 answers whatever word it finds with
    the generation's name, under that word, until every rank has said that it read an answer to its own: answers to dead
    words are read by nobody. All workers of earlier generations have ended before torchrun starts new ones.

    Raises:
        TimeoutError: naming the ranks that did not come.
    """
    limit = time.monotonic() + timeout_s
    if rank == 0:
        name = uuid.uuid4().hex
        _answer(store, name, range(1, world_size), limit)
        return name
    word = uuid.uuid4().hex
    store.set(f"{_PREFIX}/word/{rank}", word)
    answer = f"{_PREFIX}/answer/{word}"
    while not store.check([answer]):
        _wait(limit, "rank 0")
    given: str = store.get(answer).decode()
    store.set(f"{_PREFIX}/{given}/{rank}", "")
    return given


def _answer(store: Store, name: str, ranks: Iterable[int], limit: float) -> None:
    waiting, answered = set(ranks), set[str]()
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"{_PREFIX}/{name}/{rank}"]):
                waiting.discard(rank)
            elif store.check([f"{_PREFIX}/word/{rank}"]):
                word = store.get(f"{_PREFIX}/word/{rank}").decode()
                if word not in answered:
                    answered.add(word)
                    store.set(f"{_PREFIX}/answer/{word}", name)
        if waiting:
            _wait(limit, "rank(s) " + ", ".join(map(str, sorted(waiting)[:8])))


def _wait(limit: float, whom: str) -> None:
    if time.monotonic() > limit:
        raise TimeoutError(f"{whom} did not come")
    time.sleep(_POLL_S)
