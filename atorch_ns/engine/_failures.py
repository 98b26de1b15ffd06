"""What an exception inside a trial means: whose fault it is, and how to say so in one line."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from atorch_ns.engine._out_of_memory import is_out_of_memory
from atorch_ns.errors import AtorchError, RankError, StepError
from atorch_ns.search import TrialStatus

__all__ = ["Failure", "Interrupted", "NonFiniteLoss", "explain"]

# What gloo, NCCL and the store say when the other side has gone.
_LOST_PEER: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "Broken pipe",
    "remote process exited",
    "Socket closed",
    "Failed to recv, got 0 bytes",
    "wait timeout after",
)
_NOT_THE_USERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


class NonFiniteLoss(Exception):
    """The loss of a trial became infinite or NaN."""


class Interrupted(Exception):
    """A trial that was ended from outside, with the status and the reason to report."""

    def __init__(self, status: TrialStatus, reason: str) -> None:
        super().__init__(reason)
        self.status: TrialStatus = status


@dataclass(frozen=True)
class Failure:
    """How a trial failed on one rank.

    Attributes:
        status: as in a report.
        reason: the exception's type and text, and the user's line it came from.
        secondary: whether another rank is the cause: this one was left alone in a collective.
        refused_by: the method that refused, where one did.
    """

    status: TrialStatus
    reason: str
    secondary: bool = False
    refused_by: str | None = None


def explain(error: BaseException, *, applying: bool) -> Failure:
    """Reads an exception.

    Args:
        error: what was raised.
        applying: whether the strategy was still being applied, so that an error of this package's own says
            that it cannot be.
    """
    text = _said(error)
    if isinstance(error, NonFiniteLoss):
        return Failure("non-finite", str(error))
    if isinstance(error, Interrupted):
        return Failure(error.status, str(error))
    if isinstance(error, RankError):
        return Failure("raised", text, secondary=True)
    if is_out_of_memory(error):
        return Failure("out of memory", text)
    if _says(error, _LOST_PEER):
        return Failure("raised", text, secondary=True)
    if isinstance(error, AtorchError) and (applying or isinstance(error, StepError)):
        return Failure("refused", text, refused_by=error.refused_by if applying else None)
    return Failure("raised", text + _place(error))


def _said(error: BaseException) -> str:
    text = str(error).strip()
    short = text if len(text) <= 1000 else text[:997] + "..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    """Whether an error of torch's contains one of the phrases; it has no classes for these."""
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def _place(error: BaseException) -> str:
    """The innermost line that is neither torch's nor this package's, as `` (in forward, model.py:12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    if not own:
        return ""
    frame = own[-1]
    return f" (in {frame.name}, {Path(frame.filename).name}:{frame.lineno})"
