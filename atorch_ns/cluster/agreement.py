"""Agreement of ranks: one rank's value or failure sent to all, so that none waits for a stopped one."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from atorch_ns.errors import InputError, RankError
from atorch_ns.text import clip_text, error_text, first_few, with_article

if TYPE_CHECKING:
    import torch.distributed as dist


T = TypeVar("T")

_LOST_CONNECTION = re.compile(
    r"no longer answers|gloo/|closed by peer|reset by peer|Broken pipe|NCCL|ncclRemoteError"
)
"""Error texts of :func:`_translate_lost_connection`, gloo and NCCL."""

_FAIL_TOGETHER_S = 10.0  # how long a failed rank that goes on waits for the others to fail
_TURNS_BACK = 6  # most blocks between a failure and the next exchange, the phases of a step


def agree(
    action: Callable[[], T], *, what: str, distributed: bool, group: dist.ProcessGroup | None = None
) -> T:
    """Runs ``action`` on every rank and lets all ranks fail if one does.

    ``action`` must not communicate. The rank whose action failed raises its own exception; the others raise
    :class:`RankError` naming that rank and its reason.

    Args:
        action: the work of each rank.
        what: name of the action, for the message: ``"reading the strategy"``.
        distributed: whether there is a process group.
        group: process group of the ranks that act together; ``None`` for the default group.

    Raises:
        RankError: if another rank's action failed.
    """
    if not distributed:
        return action()
    import torch.distributed as dist

    result: list[T] = []
    error = None
    try:
        result.append(action())
    except Exception as raised:  # the other ranks must receive it before it is raised
        error = raised
    reason = None if error is None else error_text(error)
    try:
        reasons = gather_values(reason, distributed=True, group=group)
    except RankError:
        if error is not None:
            raise error  # noqa: B904  # what this rank met is its own, not a consequence
        raise
    if error is not None:
        raise error
    ranks = dist.get_process_group_ranks(group)
    failures = {rank: reason for rank, reason in zip(ranks, reasons, strict=True) if reason is not None}
    if failures:
        raise _failed_elsewhere(what, failures)
    return result[0]


@contextmanager
def sharing_failures(what: str, *, distributed: bool, turn: int | None = None) -> Iterator[None]:
    """Tells the other ranks why this one fails in code that communicates. All ranks enter the block.

    A rank that waits in a collective loses its connection when a failed rank's process ends. It then raises
    that rank's reason. The block itself communicates nothing. A failed rank that catches its error and lives
    on keeps the others waiting: gloo cannot end another process's wait. See :class:`SharedBlocks`.

    Args:
        what: name of the code, for the message.
        distributed: whether there is a process group.
        turn: number of such blocks that this rank has entered, equal on all ranks. Counted here by default.

    Raises:
        RankError: if this rank has lost the connection to another one.
    """
    if not distributed:
        yield
        return
    import torch.distributed as dist

    from atorch_ns.torch_compat import default_store

    if turn is None:  # ranks enter in one order, so it is the same on all
        turn = default_store().add(f"atorch_ns/turn/{dist.get_rank()}", 1)
    key = partial(_failure_key, what)
    try:
        yield
    except Exception as error:
        if not _LOST_CONNECTION.search(str(error)):
            with suppress(RuntimeError):  # the process that holds the store may have ended
                default_store().set(key(turn, dist.get_rank()), error_text(error))
            raise
        failures: dict[int, str] = {}
        with suppress(RuntimeError):
            store, this_rank = default_store(), dist.get_rank()
            others = [rank for rank in range(dist.get_world_size()) if rank != this_rank]
            # A rank that failed after the last exchange of a block is noticed in a later one of that name.
            for past_turn in range(turn, turn - _TURNS_BACK, -1):
                if store.check([key(past_turn, this_rank)]):  # this rank failed too, and all went on
                    break
                failures = failures or {
                    rank: store.get(key(past_turn, rank)).decode()
                    for rank in others
                    if store.check([key(past_turn, rank)])
                }
        if failures:
            raise _failed_elsewhere(what, failures) from error
        if isinstance(error, RankError):
            raise
        raise RankError(
            f"{what} lost the connection to another rank, whose process ended silently: it was killed, ran out of memory, "
            f"failed outside of {what}, or was ended by gloo because ranks that divide one model got batches of different "
            "shapes. The output of that process or of its launcher says which rank and why."
        ) from error


def _failure_key(what: str, turn: int, rank: int) -> str:
    return f"atorch_ns/failure/{what}/{turn}/{rank}"


class SharedBlocks:
    """Blocks of one name that all ranks enter in sequence through :func:`sharing_failures`.

    A rank that failed, caught its error and lives on is refused the next block unless all ranks failed: the
    others may still wait for it in the block where it failed.
    """

    def __init__(self, what: str, *, distributed: bool) -> None:
        self._what, self._is_distributed = what, distributed
        self._turn = 0
        self._failed_turn = 0  # the turn in which this rank failed by itself; 0 for none
        self._refusal: RankError | None = None

    @contextmanager
    def next(self) -> Iterator[None]:
        """The next block.

        Raises:
            RankError: if this rank alone failed before, or has lost the connection to another one.
        """
        if self._refusal is None and self._failed_turn and self._is_distributed:
            self._refusal = self._failed_alone()
        if self._refusal is not None:
            raise self._refusal
        self._turn, self._failed_turn = self._turn + 1, 0
        try:
            with sharing_failures(self._what, distributed=self._is_distributed, turn=self._turn):
                yield
        except RankError:
            raise
        except Exception:
            self._failed_turn = self._turn
            raise

    def _failed_alone(self) -> RankError | None:
        import torch.distributed as dist

        from atorch_ns.torch_compat import default_store

        keys = [_failure_key(self._what, self._failed_turn, rank) for rank in range(dist.get_world_size())]
        store, deadline = default_store(), time.monotonic() + _FAIL_TOGETHER_S
        try:
            while not store.check(keys):  # others may be about to fail, too
                if time.monotonic() > deadline:
                    late = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
                    return RankError(
                        f"{self._what} failed on this rank before, and not on rank(s) {late}, which may be waiting in it: the "
                        "ranks are no longer at one place, so none can go on. Let the error that was raised then end the process."
                    )
                time.sleep(0.05)
        except RuntimeError:
            return RankError(
                f"{self._what} failed on this rank before, and the process that ranks tell each other through has ended since."
            )
        return None  # all ranks have failed together


def or_refusal(action: Callable[[], T]) -> T | InputError:
    """The result of ``action`` or its error as a value to exchange. It drops frames, which hold tensors."""
    try:
        return action()
    except InputError as refusal:
        return type(refusal)(str(refusal))


def _failed_elsewhere(what: str, failures: Mapping[int, str]) -> RankError:
    lines = first_few([f"rank {rank}: {reason}" for rank, reason in failures.items()], 8, "\n  ")
    return RankError(
        f"{what} failed on {len(failures)} other rank(s), so all stopped:\n  {lines}", failures=dict(failures)
    )


def same_everywhere(values: Mapping[str, str], *, distributed: bool) -> None:
    """Checks with one collective that all ranks hold the same texts.

    Args:
        values: texts of this rank, by their name in the message.
        distributed: whether there is a process group.

    Raises:
        RankError: on every rank, with the differing texts and the ranks that hold them.
    """
    if not distributed:
        return
    lines = []
    values_by_rank = gather_values(dict(values), distributed=True)
    for what in values:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(values_by_rank):
            ranks_by_text.setdefault(texts.get(what, ""), []).append(rank)
        if len(ranks_by_text) > 1:
            listing = "; ".join(
                f"ranks {ranks} have {clip_text(text, 300)}" for text, ranks in ranks_by_text.items()
            )
            lines.append(f"{what}: {listing}")
    if lines:
        raise RankError(
            "the ranks were given different arguments, so nothing was started. " + ". ".join(lines)
        )


def from_first(value: T | None, *, distributed: bool, group: dist.ProcessGroup | None = None) -> T:
    """Returns the value of a group's first rank on all its ranks. Others may pass ``None``. Collective.

    Raises:
        InputError: on every rank, if the value cannot be pickled or unpickled.
    """
    if not distributed:
        return cast("T", value)
    import torch.distributed as dist

    message: list[Any] = [_pickle_value(value) if dist.get_rank(group) == 0 else None]
    with _translate_lost_connection(group, None):
        dist.broadcast_object_list(message, group=group, group_src=0)
    data, problem = message[0]
    if problem:
        raise InputError(f"the first rank cannot send the others {problem}")
    return cast("T", value if dist.get_rank(group) == 0 else pickle.loads(data))  # noqa: S301  # of a rank of this job


def _pickle_value(value: object) -> tuple[bytes, str]:
    # Read back at once: otherwise the ranks that read it would fail alone.
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # noqa: S301  # its own
    except Exception as error:
        return b"", f"{with_article(value)}, which does not pickle: {error_text(error)}"
    return data, ""


def gather_values(value: T, *, distributed: bool, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the values of all ranks of a group, by rank. They must pickle. Collective."""
    if not distributed:
        return [value]
    import torch.distributed as dist

    values = [value] * dist.get_world_size(group)
    with _translate_lost_connection(group, value):
        dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def _translate_lost_connection(group: dist.ProcessGroup | None, value: object) -> Iterator[None]:
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        pickle.dumps(value)  # raises again if that was the reason
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise RankError(
            f"one of the ranks {ranks} no longer answers: it was killed, ran out of memory, or is blocked; its log says "
            f"more. Error on this rank: {error_text(error)}"
        ) from error


def send_nest(nest: Any, *, group: Any, target: int, device: Any) -> None:
    """Sends a nest of tensors and plain values to a rank of a group, which calls :func:`receive_nest`."""
    import torch.distributed as dist

    from atorch_ns.capture.nests import map_tensors, tensors_of

    tensors = [tensor.contiguous() for tensor in tensors_of(nest)]
    places = iter(range(len(tensors)))
    # A tensor's place in the nest holds its index, in a type that no user value has.
    structure = map_tensors(lambda _: _Place(next(places)), nest)
    message = [(structure, [(tensor.shape, tensor.dtype) for tensor in tensors])]
    dist.send_object_list(message, group=group, group_dst=target, device=device)
    for tensor in tensors:  # in the order of their places
        dist.send(tensor, group=group, group_dst=target)


def receive_nest(*, group: Any, source: int, device: Any) -> Any:
    """Receives a nest sent with :func:`send_nest` and puts it on ``device``."""
    import torch
    import torch.distributed as dist

    from atorch_ns.capture.nests import map_instances

    message: list[Any] = [None]
    dist.recv_object_list(message, group=group, group_src=source, device=device)
    structure, specs = message[0]
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
    for tensor in tensors:
        dist.recv(tensor, group=group, group_src=source)
    return map_instances(_Place, lambda slot: tensors[slot.number], structure)


@dataclass(frozen=True)
class _Place:
    number: int
