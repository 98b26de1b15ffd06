"""Agreement of ranks: one rank's value or failure made known to all, so that none waits for one that has stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from atorch_ns.errors import RankError

if TYPE_CHECKING:
    import torch.distributed as dist


T = TypeVar("T")


def agree(
    action: Callable[[], T], *, what: str, distributed: bool, group: dist.ProcessGroup | None = None
) -> T:
    """Runs ``action`` on every rank and lets all ranks fail if one does.

    ``action`` must not communicate. The rank whose action failed raises its own exception; the others raise
    :class:`RankError` naming that rank and its reason.

    Args:
        action: what each rank does by itself.
        what: what it is, for the message: ``"reading the strategy"``.
        distributed: whether there is a process group to ask.
        group: the ranks that act together; ``None`` for all, over the default group.

    Raises:
        RankError: if another rank's action failed.
    """
    if not distributed:
        return action()
    result, error = _attempt(action)
    reason = f"{type(error).__name__}: {error}" if error is not None else None
    reasons = gathered(reason, distributed=True, group=group)
    if error is not None:
        raise error
    failures = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if failures:
        raise RankError(_failed(what, failures), failures=failures)
    assert result is not None
    return result[0]


def same_everywhere(values: Mapping[str, str], *, distributed: bool) -> None:
    """Checks that all ranks hold the same texts; one exchange for all of them.

    Args:
        values: the text that this rank holds, by what it is, as the message will call it.
        distributed: whether there is a process group to ask.

    Raises:
        RankError: on every rank, naming what differs and who holds which.
    """
    if not distributed:
        return
    held_by_rank = [json.loads(text or "{}") for text in gathered(json.dumps(dict(values)), distributed=True)]
    lines = []
    for what in values:
        holders: dict[str, list[int]] = {}
        for rank, held in enumerate(held_by_rank):
            holders.setdefault(held.get(what, ""), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{what}: " + "; ".join(f"ranks {r} have {_short(t)}" for t, r in holders.items()))
    if lines:
        raise RankError(
            "the ranks were given different arguments, so nothing was started. " + ". ".join(lines)
        )


def from_first(value: T | None, *, distributed: bool, group: dist.ProcessGroup | None = None) -> T:
    """The value that the first rank of a group passes, on each of its ranks; collective. It must pickle.

    The other ranks may pass ``None``.
    """
    values: list[Any] = [value]
    if distributed:
        import torch.distributed as dist

        dist.broadcast_object_list(values, group=group, group_src=0)
    return cast("T", values[0])


def gathered(value: T, *, distributed: bool, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values that all ranks of a group pass, by rank; collective. They must pickle."""
    if not distributed:
        return [value]
    import torch.distributed as dist

    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."


def _attempt(action: Callable[[], T]) -> tuple[tuple[T] | None, Exception | None]:
    try:
        return (action(),), None
    except Exception as error:  # whatever it is, the other ranks must hear of it before it is raised
        return None, error


def _failed(what: str, failures: dict[int, str]) -> str:
    shown = "\n".join(f"  rank {rank}: {reason}" for rank, reason in list(failures.items())[:8])
    more = f"\n  and {len(failures) - 8} more" if len(failures) > 8 else ""
    return f"{what} failed on {len(failures)} other rank(s), so all stopped:\n{shown}{more}"
