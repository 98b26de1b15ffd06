"""Places of ranks in a loop: those that wait for a call that another leaves out are ended in words."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from atorch_ns.errors import RankError
from atorch_ns.job.gradients import follow_backward_passes
from atorch_ns.torch_compat import (
    BACKWARD_FUNCTION,
    OPERATOR_CALLS,
    default_store,
    in_backward,
    observe_gathering,
)

_COMMUNICATION: Final = (f"{Path(dist.__file__).parent}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}")
"""Folders of the code that waits for other ranks: torch's and the package's."""
_POLL_S: Final = 5.0  # between looks of the thread
STUCK_S: Final = 4 * _POLL_S
"""Time at one line, four polls, after which a rank reports its place. A slow exchange may take longer. Only
different calls end ranks, and this limit keeps progressing ranks from writing."""

_KEPT_UPDATES: Final = {False: 3, True: 1000}
"""Updates whose calls are kept, keyed by whether all ranks make every call. Stuck ranks are then at most
two apart. Other ranks are apart by the updates between two polls."""
_FEW_MEETINGS: Final = 3
_FEW_UPDATES: Final = 10
"""Updates between meetings after the first meetings, since a loop may evaluate or freeze in each step."""
_MEETING_S: Final = 0.002  # first pause, doubled each time

_MOST_CALLS: Final = 1024
"""Maximum number of compared calls after one update, so that a loop that never updates cannot fill memory."""


class SamePlace:
    """Ends the process if ranks are at different places of a step and none can continue.

    A thread polls the training thread. A rank that is stuck in a call writes its calls since the last updates
    to the rendezvous store. If all ranks stay stuck and have made different calls since the same update, one
    rank has omitted a call, which rank 0 detects. A rank that computes or writes a file is not stuck. Calls
    of one rank alone, such as accumulated micro-batches, may differ unless every rank waits. Ranks that make
    every call together compare with their first rank, stuck or not, since they would mix data of different
    calls. A waiting rank cannot be woken, so the process ends, as with NCCL's watchdog.

    Args:
        name: name of the job, the same on all ranks and unique among jobs.
        together: ranks that share this rank's forward and backward passes: they divide a model or samples.
        evaluating: ranks that share this rank's passes without gradients, freezing and thawing.
    """

    def __init__(self, name: str, together: Sequence[int], evaluating: Sequence[int]) -> None:
        self._name, self._rank, self._num_ranks = name, dist.get_rank(), dist.get_world_size()
        self._together = sorted(together)
        self._evaluating = sorted(evaluating)
        self._is_meeting = False
        self._thread = threading.get_ident()  # the training thread
        self._module = 0  # id of the model
        self._num_updates = 0
        self._calls: dict[int, list[str]] = {0: []}  # after each update; lists are replaced, not changed
        self._beats: dict[int, int] = {}  # last beat seen, by rank
        self._meetings = Counter[str]()
        self._last_meetings: dict[str, int] = {}  # update of the last call that may meet
        self._is_trained: list[bool] = []

    def follow(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Watches a model and its optimizer until the process ends."""
        optimizer.register_step_pre_hook(lambda *_: self._add_call("U"))
        optimizer.register_step_post_hook(self._after_update)
        self._module = id(module)  # which lives as long as its hooks
        # Held only by the model, since the thread keeps its references forever.
        parameters = list(module.parameters()) if self._evaluating else []
        self._is_trained = [parameter.requires_grad for parameter in parameters]
        # First in each: fully_shard communicates in its own hooks.
        before = torch.compiler.disable(partial(self._before_forward, parameters))
        module.register_forward_pre_hook(before, prepend=True)
        follow_backward_passes(module, lambda: self._add_call("B"))
        observe_gathering(self._before_gathering)
        with suppress(RuntimeError):  # no thread available: nothing else depends on it
            threading.Thread(target=self._watch_thread, daemon=True, name="atorch_ns same place").start()

    def _add_call(self, call: str) -> None:
        calls = self._calls[self._num_updates]
        if len(calls) < _MOST_CALLS:
            self._calls[self._num_updates] = [*calls, call]

    def _before_gathering(self, mesh: DeviceMesh) -> None:
        if set(self._evaluating) <= set(mesh.mesh.flatten().tolist()):
            self.meet_sometimes("R")

    def _before_forward(self, parameters: Sequence[nn.Parameter], module: nn.Module, _: Any) -> None:
        # Skip copies, which have the same hooks, and recomputed blocks.
        if id(module) != self._module or in_backward():
            return
        self._thread = threading.get_ident()
        if torch.is_grad_enabled():
            before, self._is_trained = self._is_trained, [parameter.requires_grad for parameter in parameters]
            if self._is_trained != before:
                self.meet_sometimes("T")
            self._add_call("F")
        else:
            self.meet_sometimes("E")

    def meet_sometimes(self, call: str) -> None:
        """Notes a call of ranks that share passes, and meets for the first ones and after updates without one.

        Different calls exchange tensors of different sizes, which ends ranks before the thread can compare
        them. Equal calls in a row meet once.

        Args:
            call: a letter of a call, or words for it.
        """
        if not self._evaluating:
            return
        distance = self._num_updates - self._last_meetings.get(call, -_FEW_UPDATES)
        self._last_meetings[call] = self._num_updates
        is_repeated = self._calls[self._num_updates][-1:] == [call]
        if not is_repeated and (self._meetings[call] < _FEW_MEETINGS or distance >= _FEW_UPDATES):
            self.meet(call, self._evaluating)
        elif not is_repeated:
            self._add_call(call)

    def meet(self, call: str, ranks: Sequence[int] = ()) -> None:
        """Waits until ``ranks``, or all, make a call. :class:`RankError` if one never comes."""
        self._add_call(call)
        self._meetings[call] += 1
        number, num_ranks = self._meetings[call], len(ranks) or self._num_ranks
        store, key = default_store(), f"atorch_ns/meetings/{self._name}/{call}/{min(ranks, default='')}"
        if store.check(
            [self._store_key("ended")]
        ):  # another rank has ended, and its call would count as made
            self._end_process(store.get(self._store_key("ended")).decode())
        if store.add(f"{key}/{number}", 1) == num_ranks:  # the last rank has come
            store.delete_key(f"{key}/{number}")
            store.set(key, str(number))
        self._is_meeting, pause = True, _MEETING_S
        end = time.monotonic() + store.timeout.total_seconds()
        try:
            while not store.check([key]) or int(store.get(key)) < number:
                if store.check([self._store_key("ended")]):  # another rank has ended
                    self._end_process(store.get(self._store_key("ended")).decode())
                if time.monotonic() > end:
                    why = (
                        f"rank {self._rank} has waited {store.timeout} for the others to call {_in_words([call])}: they "
                        "have ended, or do something else. Call it on every rank; give init_process_group a longer "
                        "timeout if one needs more time."
                    )
                    store.set(self._store_key("ended"), f"{why}\n")  # a late rank must not continue alone
                    raise RankError(why)
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S / 20)  # all ranks poll one store
        finally:
            self._is_meeting = False

    def _after_update(self, *_: object) -> None:
        number = self._num_updates + 1
        self._calls[number] = []  # before the number, which the thread reads
        self._num_updates = number
        self._calls.pop(number - _KEPT_UPDATES[bool(self._together)], None)

    def _watch_thread(self) -> None:
        position: tuple[Any, dict[int, list[str]]] = None, {}
        since, beat = 0.0, 0
        while True:
            time.sleep(_POLL_S)
            line, is_backward, waits = self._find_line()
            calls = dict(self._calls)
            if (line, calls) != position or line is None:
                position, since = (line, calls), time.monotonic()
            is_stuck = time.monotonic() - since > STUCK_S
            if not is_stuck and not self._together:
                continue
            beat += 1  # shows that a report is new
            last = max(calls)
            if is_stuck and is_backward and calls[last][-1:] != ["B"]:
                calls = {**calls, last: [*calls[last], "B"]}  # it has not reached the hook yet
            try:
                store = default_store()
                report = {"beat": beat, "is_stuck": is_stuck, "calls": calls, "waits": waits}
                store.set(self._store_key(self._rank), json.dumps(report))
                if self._together and self._rank != self._together[0]:  # all calls are collective
                    self._compare_calls(report, self._read_places(self._together[:1]), only_last=False)
                if is_stuck and self._rank == 0:  # calls may differ while ranks progress
                    others = self._read_places(range(1, self._num_ranks))
                    if len(others) == self._num_ranks - 1 and all(
                        other["is_stuck"] for other in others.values()
                    ):
                        self._compare_calls(report, others, only_last=True)
            except (RuntimeError, ValueError):
                # The store has gone, or the process group: nobody is left to wait for.
                return

    def _find_line(self) -> tuple[tuple[Any, int] | None, bool, bool]:
        """The training thread's line, whether it is in a backward pass, and whether it waits for others."""
        if self._is_meeting:  # at any of its lines
            return (SamePlace.meet, 0), False, True
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return None, False, False
        # Code objects: keeping a frame would keep its tensors.
        codes = [parent.f_code for parent, _ in traceback.walk_stack(frame)]
        names = {code.co_name for code in codes}
        # torch calls its operators from a file of its own.
        caller = next((code for code in codes if code.co_filename != OPERATOR_CALLS), frame.f_code)
        waits = caller.co_filename.startswith(_COMMUNICATION)
        return (frame.f_code, frame.f_lineno), BACKWARD_FUNCTION in names, waits

    def _read_places(self, ranks: Sequence[int]) -> dict[int, Any]:
        store, reports = default_store(), {}
        for rank in ranks:
            if store.check([self._store_key(rank)]):
                report = json.loads(store.get(self._store_key(rank)))
                if report["beat"] > self._beats.get(rank, report["beat"]):  # newer than the last one seen
                    reports[rank] = report
                self._beats[rank] = report["beat"]
        return reports

    def _compare_calls(self, report: Mapping[str, Any], others: dict[int, Any], *, only_last: bool) -> None:
        calls = report["calls"]
        all_wait = only_last and all(each["waits"] for each in (report, *others.values()))
        for rank, other in others.items():
            theirs = {int(number): names for number, names in other["calls"].items()}
            shared = sorted(calls.keys() & theirs.keys())
            for number in shared[-1:] if only_last else shared:
                local, two = calls[number], theirs[number]
                # Being behind is not an error, unless all ranks wait.
                length = min(len(local), len(two))
                if local != two and (all_wait or local[:length] != two[:length]):
                    self._end_process(
                        f"atorch_ns: the ranks are at different places, and none can go on. After update {number}, rank "
                        f"{self._rank} has called {_in_words(local)}, and rank {rank} {_in_words(two)}. What one rank leaves out, "
                        "such as the backward pass of a loss that is not finite, or calls alone, such as an evaluation or a method of the model, "
                        "belongs to all: let them agree, by result.mean(loss) say, and write what one calls on all. This process ends.\n"
                    )

    def _store_key(self, who: object) -> str:
        return f"atorch_ns/places/{self._name}/{who}"

    def _end_process(self, why: str) -> None:
        with suppress(RuntimeError):
            default_store().set(self._store_key("ended"), why)  # for a rank that waits in a meeting
        sys.stderr.write(why)
        sys.stderr.flush()
        os._exit(1)


def _in_words(calls: Sequence[str]) -> str:
    names = {"F": "forward", "B": "backward", "U": "step", "E": "forward without gradients"}
    names["T"] = "a forward pass after freezing or thawing"
    names |= {"R": "a read of a divided tensor", "X": "an export of whole weights", "S": "checkpoint.save"}
    return ", ".join(names.get(call, call) for call in calls[-8:]) or "nothing"
