"""The order in which several nodes are examined, for each rank and for rank 0, which finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch.distributed as dist

from atorch_ns.doctor._base import Finding, Place
from atorch_ns.doctor._examine import NODE_CHECKS
from atorch_ns.doctor._nodes._board import Board
from atorch_ns.doctor._nodes._card import Card, card_of, check_alike, check_arrived
from atorch_ns.doctor._nodes._door import Door, Knock, NoAddressError, knock_at_all, own_address
from atorch_ns.doctor._nodes._each import check_each, tell_each
from atorch_ns.doctor._nodes._reach import check_clocks, check_reach
from atorch_ns.doctor._nodes._speeds import check_speeds, check_talked
from atorch_ns.doctor._nodes._talk import talk
from atorch_ns.doctor._who import Who
from atorch_ns.errors import BackendError

__all__ = ["examine_nodes"]

_SPARE_S: Final = 15.0
"""Seconds beyond a limit that rank 0 waits for those who had that limit themselves."""


def examine_nodes(place: Place, who: Who, names: Sequence[str]) -> Iterator[Finding]:
    """See :func:`atorch_ns.doctor.examine_nodes`."""
    board = Board(who, timeout_s=place.timeout_s)
    place = replace(place, num_ranks=who.local_world_size)
    examination = _Examination(board, place, who, tuple(names))
    failed = False
    try:
        for finding in examination.findings():
            failed = failed or finding.verdict == "fail"
            if who.rank == 0:
                yield finding
        if who.rank == 0:
            board.post("end", failed)
        elif board.read("end"):
            yield Finding(check="nodes", verdict="fail", text="", fix="")
    except dist.DistError as error:
        raise BackendError(
            f"rank {who.rank} on node {who.node} has lost the launcher's store at {who.host}:{who.port}: the node that "
            "keeps it has stopped, or the network between has."
        ) from error
    except BaseException:
        if who.rank == 0:
            board.give_up()
        raise
    finally:
        board.leave()


class _Examination:
    """The steps. Each posts what this rank has to say, and lets rank 0 look at what all said."""

    def __init__(self, board: Board, place: Place, who: Who, names: tuple[str, ...]) -> None:
        self._board, self._place, self._who, self._names = board, place, who, names
        self._limit_s = place.timeout_s
        self._cards: dict[int, Card] = {}
        self._clean = True

    def findings(self) -> Iterator[Finding]:
        """In order; after a step without which the next would hang, none."""
        door, problem, fix = self._opened()
        try:
            yield from self._arrive(door, problem, fix)
            if not self._goes_on("arrived"):
                return
            if "alike" in self._names and self._who.rank == 0:
                yield from check_alike(self._cards, self._who)
            if "reach" in self._names:
                yield from self._reach()
            if self._goes_on("reached") and "all-reduce" in self._names:
                yield from self._talk()
        finally:
            if door is not None:
                door.close()
        here = [name for name in self._names if name not in NODE_CHECKS]
        if self._who.leads:
            yield from self._each(here)

    def _opened(self) -> tuple[Door | None, str, str]:
        if not self._who.leads:
            return None, "", ""
        if self._who.num_nodes == 1:
            return Door(self._who.node, "127.0.0.1"), "", ""
        try:
            return Door(self._who.node, own_address()), "", ""
        except NoAddressError as error:
            return None, str(error.args[0]), str(error.args[1])
        except OSError as error:
            return (
                None,
                f"nothing can listen at its address: {error}",
                "getent hosts $(hostname)   # on that node",
            )

    def _arrive(self, door: Door | None, problem: str, fix: str) -> Iterator[Finding]:
        self._board.post("card", card_of(door.address if door else None, problem, fix).as_json())
        if self._who.rank:
            return
        everyone = range(self._who.world_size)
        told = self._board.gather("card", everyone, timeout_s=self._limit_s)
        self._cards = {rank: Card(**card) for rank, card in told.items()}
        yield from self._seen(check_arrived(self._cards, self._who, self._limit_s))

    def _reach(self) -> Iterator[Finding]:
        who, board = self._who, self._board
        if who.rank == 0:
            doors = {rank // who.local_world_size: self._cards[rank].address for rank in who.leaders}
            board.post("doors", doors)
        if who.leads:
            known = board.read("doors")
            rows = knock_at_all(
                {int(node): tuple(door) for node, door in known.items()}, timeout_s=self._limit_s
            )
            board.post("knocks", {node: knock.as_json() for node, knock in rows.items()})
        if who.rank:
            return
        told = board.gather("knocks", who.leaders, timeout_s=self._limit_s + _SPARE_S)
        knocks = {
            rank // who.local_world_size: {int(node): Knock(**knock) for node, knock in row.items()}
            for rank, row in told.items()
        }
        yield from self._seen(check_reach(knocks, self._cards, who))
        yield from check_clocks(knocks, self._cards, who)

    def _talk(self) -> Iterator[Finding]:
        board, who = self._board, self._who
        answer = talk(who, timeout_s=self._limit_s, hopeless=lambda: board.sees_flag("talk"))
        if "problem" in answer:
            board.raise_flag("talk")
        board.post("talk", answer)
        if who.rank:
            return
        told = board.gather("talk", range(who.world_size), timeout_s=self._limit_s + _SPARE_S)
        failed = check_talked(told, self._cards, who, self._limit_s)
        yield from failed or check_speeds(told, self._cards, who)

    def _each(self, names: Sequence[str]) -> Iterator[Finding]:
        """What concerns one machine, on every node."""
        for name in names:
            tell_each(self._board, self._place, name)
            if self._who.rank == 0:
                limit_s = self._limit_s + _SPARE_S
                told = self._board.gather(f"each/{name}", self._who.leaders, timeout_s=limit_s)
                yield from check_each(name, told, self._cards, self._who, limit_s)

    def _seen(self, found: list[Finding]) -> Iterator[Finding]:
        self._clean = self._clean and all(finding.verdict != "fail" for finding in found)
        yield from found

    def _goes_on(self, step: str) -> bool:
        """Rank 0 decides for all."""
        if self._who.rank == 0:
            self._board.post(step, self._clean)
            return self._clean
        return bool(self._board.read(step))
