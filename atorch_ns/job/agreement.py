"""Agreement of ranks: the samples of those that divide one model, and the weights of those that hold copies of a part."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atorch_ns.capture.nests import leaves
from atorch_ns.cluster import Mesh, gathered
from atorch_ns.errors import InputError, StepError
from atorch_ns.job.gradients import follow_backward_passes
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.text import counted, first_few
from atorch_ns.torch_compat import (
    BACKWARD_FUNCTION,
    OPERATOR_CALLS,
    default_store,
    in_backward,
    local_box,
    observe_gathering,
    plain_name,
    without_transforms,
)

log = logging.getLogger("atorch_ns")

_AXES: Final = ("tensor", "sequence", "pipeline")
"""The axes whose ranks work on the same samples."""

_NUM_VALUES: Final = 1024
"""Values of each tensor that are compared, at places drawn once for all ranks."""

_TOLERANCE: Final = 1e-2
"""Floating values may differ by this share of the largest: ranks may have computed them, with rounding errors of 2^-8 in bfloat16."""

_EVERY: Final = 1000
"""A comparison is an exchange that waits for the device: at most a thousandth of the time, even if it took as long as a step."""


class _Leaf(NamedTuple):
    """A value of a batch, as ranks tell each other of it."""

    where: str
    kind: str
    values: torch.Tensor


class SameBatch:
    """Compares the samples of the ranks along the axes tensor, sequence and pipeline.

    Those of the first call and of every thousandth after it are compared, of training and of inference each.

    Ranks that make their data in each process, without a common seed, would otherwise train one model on different samples
    in silence.

    Args:
        mesh: the arrangement of ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._axes = [name for name in _AXES if mesh.size(name) > 1]
        self._counts = {True: 0, False: 0}

    def attach(self, module: nn.Module) -> None:
        """Checks what ``module`` is called with."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.check({**dict(enumerate(args)), **kwargs})

        module.register_forward_pre_hook(torch.compiler.disable(before), prepend=True, with_kwargs=True)

    def check(self, samples: Any) -> None:
        """Compares ``samples``, a nest of tensors, if it is their turn; collective over those ranks then.

        Raises:
            InputError: on each of those ranks, if the samples of two of them differ; it names the first place.
        """
        trains = torch.is_grad_enabled()
        self._counts[trains] += 1
        if self._counts[trains] % _EVERY != 1 or not self._axes:
            return
        told = [(dist.get_rank(), list(_leaves(samples)))]
        for name in self._axes:
            every = gathered(told, distributed=True, group=self._mesh.axis(name).get_group())
            told = list(chain.from_iterable(every))
        told.sort(key=lambda one: one[0])
        first, expected = told[0]
        for rank, found in told[1:]:
            problem = _difference(expected, found)
            if problem is not None:
                axes = ", ".join(f"{name}={self._mesh.size(name)}" for name in self._axes)
                raise InputError(
                    f"ranks {first} and {rank} divide one model ({axes}) and must be given the same samples, but {problem}. "
                    "Make the data the same in every process: call torch.manual_seed(0) before they, or their random "
                    "transforms, are drawn, or read them from files."
                )


def _leaves(samples: Any) -> Iterator[_Leaf]:
    for path, leaf in leaves(samples):
        where = "batch" + "".join(f"[{key!r}]" for key in path)
        if isinstance(leaf, torch.Tensor):
            kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            yield _Leaf(where, kind, _some_values(without_transforms(leaf)))
        elif leaf is None or isinstance(leaf, (bool, int, float)):  # texts may be names of a machine's files
            yield _Leaf(where, repr(leaf), torch.empty(0))


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values at fixed places, float64 on the CPU; none of a tensor of which this rank may hold a part."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return torch.empty(0)
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    places = torch.arange(len(flat))
    if len(flat) > _NUM_VALUES:
        places = torch.randint(len(flat), (_NUM_VALUES,), generator=torch.Generator().manual_seed(0))
    return flat[places.to(flat.device)].cpu().double()


def _difference(expected: list[_Leaf], found: list[_Leaf]) -> str | None:
    if [leaf[:2] for leaf in expected] != [leaf[:2] for leaf in found]:
        return f"they are {_kinds(expected)} and {_kinds(found)}"
    for one, other in zip(expected, found, strict=True):
        rounding = _TOLERANCE if one.kind.startswith(("float", "bfloat", "complex")) else 0.0
        largest = float(one.values.nan_to_num(0.0, 0.0, 0.0).abs().max()) if len(one.values) else 0.0
        same = torch.isclose(one.values, other.values, rtol=0.0, atol=rounding * largest, equal_nan=True)
        if not same.all():
            place = int((~same).nonzero()[0])
            share = f"{float((~same).double().mean()):.0%} of the values compared in {one.where} differ"
            return f"{share}, such as {one.values[place]:g} and {other.values[place]:g}"
    return None


def _kinds(told: list[_Leaf]) -> str:
    return first_few([f"{where} {kind}" for where, kind, _ in told], 8) or "empty"


_FIRST_UPDATES: Final = (1, 2, 3, 10, 30, 100, 300)
"""Updates that are compared, after the beginning and after a load: masters are rounded into weights after the update that
is seen, so that two updates are seen by the third. Later ones are for runs that end before the thousandth."""

_NUM_SAMPLED: Final = 16
"""Elements of each parameter that tell an update of its own from rounding."""

_ROUNDING: Final = 1e-4
"""Share of a parameter's largest sampled element by which copies may differ without an error: ranks with other processors may
round otherwise."""

_DATA_AXES: Final = ("data", "zero", "expert")


class _Record(NamedTuple):
    """What a rank has written after an update: [2, P] names of its parts as numbers and sums of their bits, and [P, n]
    elements."""

    update: int
    paths: list[str]
    sums: np.ndarray
    samples: np.ndarray


class SameWeights:
    """Compares the weights of ranks that hold copies, and waits for a rank only where it is two of these updates behind.

    After the first updates, some later ones and every thousandth, each rank writes a checksum of the bits of each
    parameter, or of its part, into the store by which the ranks have met. It reads those of a rank that holds the same when
    they are there.
    Gradients that were changed, left out or not reduced on one rank show here, whatever loop has made them.

    Args:
        mesh: the arrangement of ranks.
        roots: modules with the parameters of this rank.
        name: of the job, the same on all ranks and on no other job.
        gradients: whether each rank updates some weights and sends them: gradients, and weights before it, tell what they came from.

    Attributes:
        is_on: whether weights are compared; the same on all ranks.
    """

    def __init__(self, mesh: Mesh, roots: list[nn.Module], name: str, *, gradients: bool = False) -> None:
        self._name, self._roots, self._rank = name, roots, dist.get_rank()
        self._others = _ranks_with_copies(mesh)
        self._num_updates = self._begin = self._number = 0
        self._waiting: dict[int, _Record] = {}
        self._gradients = self._record_parts({}) if gradients else None
        self.is_on = True
        self._is_warned = self._has_gradient = False

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks from now on after the updates of an optimizer, whatever loop calls them."""
        optimizer.register_step_pre_hook(self._note_gradient)
        optimizer.register_step_pre_hook(self._note_gradients)
        optimizer.register_step_post_hook(self._after_update)

    def _note_gradient(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._has_gradient |= any(p.grad is not None for g in optimizer.param_groups for p in g["params"])

    def _note_gradients(self, *_: object) -> None:
        if self._gradients is not None and self._is_due(self._num_updates + 1):
            found: dict[torch.Tensor, str] = {}
            for path, parameter in self._named_parameters():
                found[parameter] = f"{path} before the update"
                if parameter.grad is not None:
                    found[parameter.grad] = f"the gradient of {path}"
            self._gradients = self._record_parts(found)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (entry for root in self._roots for entry in root.named_parameters())

    @torch.no_grad()
    def _record_parts(self, named: Mapping[torch.Tensor, str], before: _Record | None = None) -> _Record:
        named = {tensor: path for tensor, path in named.items() if _is_plain(tensor)}
        paths = [plain_name(path) for path in named.values()]
        keys = [_key_of(path, tensor) for path, tensor in zip(paths, named, strict=True)]
        totals = [int(total) for total in _on_cpu([sum_of_bits(local_part(tensor)) for tensor in named], 0)]
        samples = _on_cpu([_sample_elements(local_part(tensor)) for tensor in named], _NUM_SAMPLED).numpy()
        sums = np.array([keys, totals], np.int64)
        if before is not None:
            paths, sums = before.paths + paths, np.hstack([before.sums, sums])
            samples = np.vstack([before.samples, samples])
        return _Record(self._num_updates, paths, sums, samples)

    def _is_due(self, update: int) -> bool:
        return update - self._begin in _FIRST_UPDATES or update % _EVERY == 0

    def begin_anew(self) -> None:
        """Compares the next updates, as after a load, on all ranks."""
        self._begin = self._num_updates

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._note_gradient(optimizer)  # of a closure; one that was there before the step may have gone
        has_gradient, self._has_gradient = self._has_gradient, False
        # Without a gradient nothing was exchanged, and ranks may be at other updates.
        if not (self.is_on and has_gradient):
            return
        for number in tuple(self._waiting):
            self._compare_copies(number)
        self._num_updates += 1
        if self._is_due(self._num_updates):
            self._write_checksums(_options_of(optimizer))

    @torch.no_grad()
    def _write_checksums(self, options: dict[torch.Tensor, str]) -> None:
        """Writes what this rank holds, and reads later what others do.

        Raises:
            StepError: if another rank is two of these updates behind.
        """
        self._number += 1
        late = self._waiting.get(number := self._number - 2)
        if late is not None:
            with suppress(RuntimeError):  # where updates exchange nothing, others may be behind
                keys = [self._key(rank, "samples", number) for rank in self._others]
                default_store().wait(keys, timedelta(seconds=_STUCK_S))
            self._compare_copies(number)
        if late is not None and number in self._waiting:
            raise StepError(
                f"rank {self._rank} has made update {self._num_updates}, and of the ranks {', '.join(map(str, self._others))} one "
                f"has not come to update {late.update}. Ranks must step together, or leave a step out together."
            )
        named: dict[torch.Tensor, str] = {p: path for path, p in self._named_parameters()}
        written = self._record_parts(named | options, self._gradients)
        store = default_store()
        store.set(self._key(self._rank, "sums"), written.sums.tobytes())
        store.set(self._key(self._rank, "samples"), written.samples.tobytes())
        self._waiting[self._number] = written
        for what in ("sums", "samples"):  # all have read those: a rank that is two behind ends the others
            store.delete_key(self._key(self._rank, what, self._number - 3))

    def _key(self, rank: int, what: str, number: int | None = None) -> str:
        return f"atorch_ns/weights/{self._name}/{self._number if number is None else number}/{rank}/{what}"

    def _compare_copies(self, number: int) -> None:
        """Compares with each rank that holds a copy, once all have written.

        Raises:
            StepError: if an element differs by more than rounding.
        """
        store, own = default_store(), self._waiting[number]
        if not store.check([self._key(rank, "samples", number) for rank in self._others]):
            return
        del self._waiting[number]
        for rank in self._others:
            sums = np.frombuffer(store.get(self._key(rank, "sums", number)), np.int64).reshape(2, -1)
            samples = np.frombuffer(store.get(self._key(rank, "samples", number)), np.float32)
            _, here, there = np.intersect1d(own.sums[0], sums[0], return_indices=True)
            differ = own.sums[1][here] != sums[1][there]
            if differ.any():
                here, other = here[differ], samples.reshape(-1, _NUM_SAMPLED)[there[differ]]
                self._raise_difference(own, rank, here, other)

    def _raise_difference(self, own: _Record, rank: int, places: np.ndarray, other: np.ndarray) -> None:
        samples = own.samples[places]
        with np.errstate(invalid="ignore"):
            off = np.abs(samples - other).max(1)
            largest = np.maximum(np.abs(samples).max(1), np.abs(other).max(1))
            nan_on_both = np.isnan(samples).any(1) & np.isnan(other).any(1)
            wrong = ~(off <= _ROUNDING * largest) & ~nan_on_both
        paths = [own.paths[place] for place in (places[wrong] if wrong.any() else places)]
        if wrong.any():
            raise StepError(
                f"after update {own.update}, rank {self._rank} holds other weights than rank {rank}, which must be copies: "
                f"{counted(len(places), 'parameter')} of {len(own.paths)}, such as {first_few(paths, 3)}. What was done on one "
                "rank alone must be done on all: a step that is left out, gradients that are changed, clipped or computed by hand "
                "of its own samples, weights that are written or loaded, a learning rate that follows its own loss (result.mean "
                "gives that of all). atorch-ns verify --script names the first update and its line."
            )
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "after update %d, the weights of rank %d and of rank %d differ by rounding (%s), as processors of different "
                "kinds may do; they are copies and may drift apart.",
                *(own.update, self._rank, rank, first_few(paths, 3)),
            )


def _ranks_with_copies(mesh: Mesh) -> list[int]:
    """For each set of the axes of data the first rank along them, and for that one the last; those hold the same parts of all
    that is not divided there."""
    names = mesh.device_mesh.mesh_dim_names or ()
    own: Sequence[int] = mesh.device_mesh.get_coordinate() or ()
    axes = [number for number, name in enumerate(names) if name in _DATA_AXES]
    found = set()
    for chosen in product((False, True), repeat=len(axes)):
        place = list(own)
        moved = [axis for axis, is_chosen in zip(axes, chosen, strict=True) if is_chosen]
        target = 0 if any(own[axis] for axis in moved) else -1
        for axis in moved:
            place[axis] = target
        found.add(int(mesh.device_mesh.mesh[tuple(place)]))
    return sorted(found - {dist.get_rank()})


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether it has elements that can be read; parts in a packing of a library of its own cannot."""
    part = local_part(parameter).detach()  # a parameter is of a class of its own
    return (
        type(part) is torch.Tensor and part.layout == torch.strided and not part.is_meta and part.numel() > 0
    )


def _options_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """The numbers among the options of an optimizer's groups, as the learning rate, with words for each."""
    found: dict[str, list[float]] = {}
    for option, value in (entry for group in optimizer.param_groups for entry in group.items()):
        values = [value] if not isinstance(value, (list, tuple)) else [] if option == "params" else value
        numbers = [each for each in values if isinstance(each, (int, float)) or getattr(each, "ndim", 1) == 0]
        found.setdefault(f"{option} of the optimizer", []).extend(map(float, numbers))
    return {torch.tensor(numbers, dtype=torch.float64): words for words, numbers in found.items()}


def _key_of(path: str, parameter: torch.Tensor) -> int:
    """A number for what a rank holds: the parameter, and the place of its part."""
    place = local_box(parameter) if isinstance(parameter, DTensor) else ()
    digest = hashlib.blake2b(f"{path} {place} {tuple(parameter.shape)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _on_cpu(values: list[torch.Tensor], width: int) -> torch.Tensor:
    """On the CPU; a rank may hold parts without elements alone."""
    return torch.stack(values).cpu() if values else torch.zeros((0, width) if width else 0)


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(part: torch.Tensor) -> torch.Tensor:
    """The sum of an array's bits as integers, 0-d int64; equal for equal bits, in any order of summation."""
    whole = torch.view_as_real(part) if part.is_complex() else part
    return whole.contiguous().view(_INTEGERS[whole.itemsize]).sum(dtype=torch.int64)


def _sample_elements(part: torch.Tensor) -> torch.Tensor:
    """[n] elements at even distances, as float32; of a small array some of them again."""
    flat = (torch.view_as_real(part) if part.is_complex() else part).reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, _NUM_SAMPLED, device=flat.device).long()
    return flat[places].float()


_COMMUNICATION: Final = (str(Path(dist.__file__).parent), str(Path(__file__).parent.parent))
"""Where the code is that waits for other ranks: torch's and the package's."""
_POLL_S: Final = 5.0
_STUCK_S: Final = 4 * _POLL_S
"""A rank that four polls have found at one line tells the others where it is. A slow exchange may take longer: what ends ranks is
that their calls differ, and this only keeps ranks that go on from writing."""

_KEPT_UPDATES: Final = {False: 3, True: 1000}
"""By whether every call is one of all, updates of which calls are kept: ranks that are stuck are at most two apart, those that go on as many as they make between
two polls."""
_FEW_MEETINGS: Final = 3
_FEW_UPDATES: Final = 10
"""Ranks meet for the first evaluations, and after so many updates without: a loop may run its model without gradients in each step."""
_MEETING_S: Final = 0.002

_MOST_CALLS: Final = 1024
"""Calls after one update that are compared; a loop that never updates would fill the memory."""


class SamePlace:
    """Ends ranks that are at different places of a step, where none can go on.

    A thread looks now and then at what the training thread does. A rank that is stuck in a call writes its calls since the
    last updates into the store by which ranks have met. Where all ranks stay stuck and have made other calls since the same
    update, one has left a call out: rank 0 sees it. A rank that computes, or writes a file, is not stuck, and calls need not
    be equal where they are of each rank alone, as accumulated micro-batches, unless every rank waits for others.
    Ranks whose every call is one of all compare with the first of them whether they are stuck or not, since they would
    exchange what belongs to different calls. A rank that waits cannot be woken, so the process ends, as with NCCL's watchdog.

    Args:
        name: of the job, the same on all ranks and on no other job.
        together: the ranks whose forward and backward passes are those of this rank too, as where they divide parameters or
            samples; empty for none.
        evaluating: the ranks whose passes without gradients are.
    """

    def __init__(self, name: str, together: Sequence[int], evaluating: Sequence[int]) -> None:
        self._name, self._rank, self._num_ranks = name, dist.get_rank(), dist.get_world_size()
        self._together = sorted(together)
        self._evaluating = sorted(evaluating)
        self._is_meeting = False
        self._thread = threading.get_ident()
        self._module = 0
        self._num_updates = 0
        self._calls = {0: ""}
        self._beats: dict[int, int] = {}
        self._meetings = Counter[str]()
        self._last_evaluation = -_FEW_UPDATES

    def follow(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Watches a model and its optimizer until the process ends."""
        optimizer.register_step_pre_hook(lambda *_: self._add_call("U"))
        optimizer.register_step_post_hook(self._after_update)
        self._module = id(module)  # which lives as long as its hooks
        # First in each: fully_shard communicates in hooks of its own.
        module.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
        follow_backward_passes(module, lambda: self._add_call("B"))
        observe_gathering(self._before_gathering)
        with suppress(RuntimeError):  # no room for a thread: nothing else depends on it
            threading.Thread(target=self._watch_thread, daemon=True, name="atorch_ns same place").start()

    def _add_call(self, letter: str) -> None:
        calls = self._calls[self._num_updates]
        if len(calls) < _MOST_CALLS:
            self._calls[self._num_updates] = calls + letter

    def _before_gathering(self, mesh: DeviceMesh) -> None:
        if set(self._together or range(self._num_ranks)) <= set(mesh.mesh.flatten().tolist()):
            self._add_call("R")

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        # Not of a copy, which has its hooks, nor of a block that is recomputed.
        if id(module) != self._module or in_backward():
            return
        self._thread = threading.get_ident()
        if torch.is_grad_enabled():
            self._add_call("F")
        elif self._evaluating and not self._calls[self._num_updates].endswith("E"):
            passed, self._last_evaluation = self._num_updates - self._last_evaluation, self._num_updates
            if self._meetings["E"] < _FEW_MEETINGS or passed >= _FEW_UPDATES:
                self.meet("E", self._evaluating)

    def meet(self, letter: str, ranks: Sequence[int] = ()) -> None:
        """Waits until some ranks, or all, make the call of a letter: one alone exchanges nothing with their other calls."""
        self._add_call(letter)
        self._meetings[letter] += 1
        number, num_ranks = self._meetings[letter], len(ranks) or self._num_ranks
        store, key = default_store(), f"atorch_ns/meetings/{self._name}/{letter}/{min(ranks, default='')}"
        if store.add(f"{key}/{number}", 1) == num_ranks:
            store.delete_key(f"{key}/{number}")
            store.set(key, str(number))
        self._is_meeting, pause = True, _MEETING_S
        while not store.check([key]) or int(store.get(key)) < number:
            if store.check([self._key("ended")]):
                self._end_process(store.get(self._key("ended")).decode())
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S / 20)  # of a store that all ranks ask
        self._is_meeting = False

    def _after_update(self, *_: object) -> None:
        number = self._num_updates + 1
        self._calls[number] = ""  # before the number, which the thread reads
        self._num_updates = number
        self._calls.pop(number - _KEPT_UPDATES[bool(self._together)], None)

    def _watch_thread(self) -> None:
        place: tuple[Any, dict[int, str]] = None, {}
        since, beat = 0.0, 0
        while True:
            time.sleep(_POLL_S)
            line, is_backward, waits = self._find_line()
            calls = dict(self._calls)
            if (line, calls) != place or line is None:
                place, since = (line, calls), time.monotonic()
            is_stuck = time.monotonic() - since > _STUCK_S
            if not is_stuck and not self._together:
                continue
            beat += 1
            last = max(calls)
            if is_stuck and is_backward and not calls[last].endswith("B"):
                calls = {**calls, last: calls[last] + "B"}  # it has not come to the hook yet
            try:
                store = default_store()
                told = {"beat": beat, "is_stuck": is_stuck, "calls": calls, "waits": waits}
                store.set(self._key(self._rank), json.dumps(told))
                if self._together and self._rank != self._together[0]:
                    self._compare_calls(told, self._read_places(self._together[:1]), only_last=False)
                if is_stuck and self._rank == 0:
                    others = self._read_places(range(1, self._num_ranks))
                    if len(others) == self._num_ranks - 1 and all(
                        other["is_stuck"] for other in others.values()
                    ):
                        self._compare_calls(told, others, only_last=True)
            except (RuntimeError, ValueError):
                # The store has gone, or the process group: nobody is left to wait for.
                return

    def _find_line(self) -> tuple[tuple[Any, int] | None, bool, bool]:
        """The line of the training thread, whether it is in a backward pass, and whether it is one of communication, where a
        line that takes long waits. No frame outlives this: it would keep the tensors of its function."""
        if self._is_meeting:  # at any of its lines
            return (SamePlace.meet, 0), False, True
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return None, False, False
        codes = [found.f_code for found, _ in traceback.walk_stack(frame)]
        names = {code.co_name for code in codes}
        # torch calls its operators from a file of its own.
        caller = next((code for code in codes if code.co_filename != OPERATOR_CALLS), frame.f_code)
        waits = caller.co_filename.startswith(_COMMUNICATION)
        return (frame.f_code, frame.f_lineno), BACKWARD_FUNCTION in names, waits

    def _read_places(self, ranks: Sequence[int]) -> dict[int, Any]:
        """What those of the ranks have told that told it since the last time."""
        store, found = default_store(), {}
        for rank in ranks:
            if store.check([self._key(rank)]):
                told = json.loads(store.get(self._key(rank)))
                if told["beat"] > self._beats.get(rank, told["beat"]):
                    found[rank] = told
                self._beats[rank] = told["beat"]
        return found

    def _compare_calls(self, told: Mapping[str, Any], others: dict[int, Any], *, only_last: bool) -> None:
        """Ends this process where a rank has made other calls after an update, the last one that both have made or any."""
        calls = told["calls"]
        all_wait = only_last and all(each["waits"] for each in (told, *others.values()))
        for rank, other in others.items():
            theirs = {int(number): text for number, text in other["calls"].items()}
            shared = sorted(calls.keys() & theirs.keys())
            for number in shared[-1:] if only_last else shared:
                one, two = calls[number], theirs[number]
                if one != two and (all_wait or not (one.startswith(two) or two.startswith(one))):
                    self._end_process(
                        f"atorch_ns: the ranks are at different places, and none can go on. After update {number}, rank "
                        f"{self._rank} has called {_in_words(one)}, and rank {rank} {_in_words(two)}. What one rank leaves out, "
                        "such as the backward pass of a loss that is not finite, or calls alone, such as an evaluation, belongs "
                        "to all: let them agree, by result.mean(loss) say, and write what one calls on all. This process ends.\n"
                    )

    def _key(self, who: object) -> str:
        return f"atorch_ns/places/{self._name}/{who}"

    def _end_process(self, why: str) -> None:
        with suppress(RuntimeError):
            default_store().set(self._key("ended"), why)  # for a rank that waits in a meeting
        sys.stderr.write(why)
        sys.stderr.flush()
        os._exit(1)


def _in_words(calls: str) -> str:
    names = {"F": "forward", "B": "backward", "U": "step", "E": "forward without gradients"}
    names |= {"R": "a read of a divided tensor", "X": "an export of whole weights", "S": "checkpoint.save"}
    return ", ".join(names[call] for call in calls[-8:]) or "nothing"
