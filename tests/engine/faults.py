"""Faults by name: what goes wrong, on which rank, at which step.

::

    inputs = inject(inputs, fault("kill", rank=1, at="dryrun:3"))   # SIGKILL in the third step of every trial
    inputs = inject(inputs, fault("raise", at="forward", trial=2))  # only in trial 2
    ATORCH_NS_FAULTS='[{"kind": "slow", "rank": 1, "seconds": 0.1}]' python train.py  # inject(inputs) reads it

=========  =============================================================================================
kind       what happens
=========  =============================================================================================
raise      an :class:`InjectedFault`
oom        an allocation that no machine can serve
kill       SIGKILL, as the system or an operator sends it
crash      SIGSEGV, as a broken extension gives it
exit       the process leaves with exit code 3, saying nothing
hang       the rank waits for ever for a message that nobody sends
slow       the rank takes ``seconds`` longer, in this and every later step
nonfinite  the loss is NaN (at ``loss`` only)
=========  =============================================================================================

A step is counted by the calls of what the fault is put into, from 1 on, in each process: in a trial, from the
trial's beginning.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from atorch_ns.errors import InputError
from atorch_ns.job import Inputs

Kind = Literal["raise", "oom", "kill", "crash", "exit", "hang", "slow", "nonfinite"]
Place = Literal["loss", "forward", "dataset", "optimizer"]

ENVIRONMENT: Final = "ATORCH_NS_FAULTS"
"""Variable with a JSON list of faults, for scripts that call ``inject(inputs)``."""

_TRIAL: Final = "ATORCH_NS_TRIAL"
_TOO_MUCH: Final = 1 << 60
_PLACES: Final = {"dryrun": "loss"} | {place: place for place in get_args(Place)}


class InjectedFault(Exception):
    """What a fault of kind "raise" raises."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: kind of fault.
        rank: rank that fails; ``None`` for all.
        place: user code that fails: the loss, the model's forward pass, the dataset, the optimizer's step.
        step: number of the failing call, from 1.
        trial: id of the only trial that fails; ``None`` for every process.
        seconds: duration of a "slow" fault.
    """

    kind: Kind
    rank: int | None = None
    place: Place = "loss"
    step: int = 1
    trial: int | None = None
    seconds: float = 0.05

    def strikes(self, call: int) -> bool:
        """Whether it happens here, now, at this call."""
        if self.rank is not None and self.rank != _rank():
            return False
        if self.trial is not None and os.environ.get(_TRIAL) != str(self.trial):
            return False
        return call >= self.step if self.kind == "slow" else call == self.step

    def strike(self) -> None:
        """Lets it happen; returns after "slow" and "nonfinite" only."""
        if self.kind == "raise":
            raise InjectedFault(f"injected in the {self.place} at call {self.step}")
        if self.kind == "oom":
            torch.empty(_TOO_MUCH, dtype=torch.uint8)
        elif self.kind in ("kill", "crash"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSEGV)
        elif self.kind == "exit":
            os._exit(3)
        elif self.kind == "hang":
            _wait_for_ever()
        elif self.kind == "slow":
            time.sleep(self.seconds)


def fault(
    kind: Kind,
    *,
    rank: int | None = None,
    at: str = "dryrun:1",
    trial: int | None = None,
    seconds: float = 0.05,
) -> Fault:
    """A fault, written in short.

    Args:
        kind: what goes wrong.
        rank: rank that fails; ``None`` for all.
        at: ``"<place>:<step>"`` or ``"<place>"`` for its first call; a place is ``loss`` (also ``dryrun``),
            ``forward``, ``dataset`` or ``optimizer``.
        trial: id of the only trial that fails.
        seconds: duration of a "slow" fault.

    Raises:
        InputError: for an unknown kind, place or step.
    """
    place, _, step = at.partition(":")
    if kind not in get_args(Kind) or place not in _PLACES or not (step or "1").isdigit():
        raise InputError(
            f"there is no fault {kind!r} at {at!r}. Kinds: {', '.join(get_args(Kind))}. Places: "
            f"{', '.join(_PLACES)}, with a step as in 'loss:3'."
        )
    if kind == "nonfinite" and _PLACES[place] != "loss":
        raise InputError(f"the fault 'nonfinite' is one of the loss, not of {place}.")
    where: Any = _PLACES[place]
    return Fault(kind=kind, rank=rank, place=where, step=int(step or 1), trial=trial, seconds=seconds)


def faults_from_environment() -> tuple[Fault, ...]:
    """The faults that :data:`ENVIRONMENT` lists: objects with the arguments of :func:`fault`."""
    return tuple(fault(**item) for item in json.loads(os.environ.get(ENVIRONMENT, "[]")))


def inject(inputs: Inputs, *faults: Fault) -> Inputs:
    """The user's objects with faults in them; a fault of the forward pass is a hook on the model itself.

    Args:
        inputs: the user's objects.
        faults: what goes wrong; none for what the environment says.
    """
    for item in faults or faults_from_environment():
        if item.place == "loss":
            assert inputs.loss_func is not None
            inputs = replace(inputs, loss_func=_FaultyLoss(inputs.loss_func, item))
        elif item.place == "forward":
            inputs.model.register_forward_pre_hook(_FaultyForward(item))
        elif item.place == "dataset":
            inputs = replace(inputs, dataset=_FaultyDataset(inputs.dataset, item))
        else:
            assert inputs.optim_func is not None
            inputs = replace(inputs, optim_func=_FaultyOptimizer(inputs.optim_func, item))
    return inputs


class _Counted:
    """Counts calls and lets the fault strike when it is time."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._calls = 0

    def call(self) -> bool:
        """Whether the fault struck and let the caller go on."""
        self._calls += 1
        if not self.fault.strikes(self._calls):
            return False
        self.fault.strike()
        return True


class _FaultyLoss(_Counted):
    def __init__(self, loss_func: Callable[[Any, Any], Any], fault: Fault) -> None:
        super().__init__(fault)
        self._loss_func = loss_func

    def __call__(self, batch: Any, output: Any) -> Any:
        struck = self.call()
        loss = self._loss_func(batch, output)
        return loss * float("nan") if struck and self.fault.kind == "nonfinite" else loss


class _FaultyForward(_Counted):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.call()


class _FaultyDataset(_Counted, Dataset[Any]):
    def __init__(self, dataset: Any, fault: Fault) -> None:
        super().__init__(fault)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self.call()
        return self._dataset[index]


class _FaultyOptimizer:
    """Makes the user's optimizer, with a hook before each step."""

    def __init__(self, optim_func: Callable[..., torch.optim.Optimizer], fault: Fault) -> None:
        self._optim_func = optim_func
        self._counted = _Counted(fault)

    def __call__(self, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        optimizer = self._optim_func(parameters, **options)
        optimizer.register_step_pre_hook(self._before_step)
        return optimizer

    def _before_step(self, *ignored: Any) -> None:
        self._counted.call()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _wait_for_ever() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        peer = (dist.get_rank() + 1) % dist.get_world_size()
        dist.recv(torch.zeros(1), src=peer, tag=12345)
    while True:
        time.sleep(60)


def as_environment(*faults: Fault) -> dict[str, str]:
    """The variable that makes ``inject(inputs)`` of another process inject these."""
    items = []
    for item in faults:
        fields = asdict(item)
        place, step = fields.pop("place"), fields.pop("step")
        items.append({**fields, "at": f"{place}:{step}"})
    return {ENVIRONMENT: json.dumps(items)}
