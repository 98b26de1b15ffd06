"""Candidate: one strategy that a search may choose, with what it is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from atorch_ns.estimate import Estimate
from atorch_ns.strategy import Strategy

__all__ = ["Candidate", "Fate", "Pruned"]


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Why a candidate is not worth a trial.

    Attributes:
        kind: ``"memory"`` (does not fit), ``"slower"`` (the estimate rules it out), ``"same"`` (amounts to
            another candidate), ``"impossible"`` (refused when it was resolved).
        reason: in one sentence with its numbers.
        hint: what would help, as a clause; empty if nothing is known to.
    """

    kind: Literal["memory", "slower", "same", "impossible"]
    reason: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One strategy of the space. Plain values only, so it travels as JSON (pydantic's ``TypeAdapter``).

    Attributes:
        key: short, unique, the same on every rank and in every run: a digest of the steps.
        steps: ``(name, config)`` of each method, as in a strategy file; configs are JSON values.
        label: the steps in a few words, for tables.
        estimate: what it is predicted to cost; ``None`` where it could not be priced.
        is_baseline: whether this is the plain strategy that others are held against.
        pruned: why it will not be tried; ``None`` if it may.
        setup_seconds: what a trial of it needs beyond the usual before its first step (compilation), predicted.
        largest_batch: samples of the largest step that is predicted to fit, where that is the objective.
        largest_batch_bytes: the peak that is predicted for that step.
        given_batch: samples of the step that the estimate and the trials are of, beside ``largest_batch``.
        grounds: by method, a digest of all that its refusal to be applied would rest on, for methods of which
            that is known.
    """

    key: str
    steps: tuple[tuple[str, Any], ...]
    label: str
    estimate: Estimate | None = None
    is_baseline: bool = False
    pruned: Pruned | None = None
    setup_seconds: float = 0.0
    largest_batch: int | None = None
    largest_batch_bytes: float | None = None
    given_batch: int | None = None
    grounds: tuple[tuple[str, str], ...] = ()

    @property
    def strategy(self) -> Strategy:
        """The candidate as a strategy."""
        return Strategy(self.steps)


Fate = Literal["won", "lost", "failed", "pruned", "untried"]
"""What became of a candidate."""
