"""Checks and findings: their types, and a call in a process of its own for what may crash or hang."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atorch_ns.processes import Ranks, scratch_folder
from atorch_ns.processes.calls import CALL_MODULE, read_outcome, send_call

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check.

    Attributes:
        check: the check's name.
        verdict: ``"fail"``: training will not work; ``"warn"``: it may be slow or break later.
        text: the state of the machine, with its numbers.
        fix: the command or step that solves it; empty for a check that passes.
        figures: measurements, plain values with a unit in each name.
    """

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The finding as plain values."""
        return asdict(self)


def passed(check: str, text: str, *, figures: Mapping[str, Any] | None = None) -> Finding:
    """A finding that all is well."""
    return Finding(check=check, verdict="pass", text=text, figures=figures or {})


def warned(check: str, text: str, fix: str, *, figures: Mapping[str, Any] | None = None) -> Finding:
    """A finding that something may be slow or break later."""
    return Finding(check=check, verdict="warn", text=text, fix=fix, figures=figures or {})


def failed(check: str, text: str, fix: str, *, figures: Mapping[str, Any] | None = None) -> Finding:
    """A finding that training will not work."""
    return Finding(check=check, verdict="fail", text=text, fix=fix, figures=figures or {})


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine to check.

    Attributes:
        num_ranks: processes of a job here.
        folder: folder for checkpoints.
        timeout_s: seconds that one check may take.
    """

    num_ranks: int = 2
    folder: Path = Path()
    timeout_s: float = 60.0


Check = Callable[[Place], list[Finding]]
"""Checks one thing. An exception becomes a finding that fails."""


def as_check(findings: Callable[[Place], Iterator[Finding]]) -> Check:
    """A check of a function that yields its findings."""

    @functools.wraps(findings)
    def check(machine: Place) -> list[Finding]:
        return list(findings(machine))

    return check


class Isolated(NamedTuple):
    """The outcome of an isolated call: a value, or the problem."""

    value: Any
    problem: str


def call_isolated(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Isolated:
    """Calls ``function(*arguments)`` in a fresh interpreter. Its output is dropped.

    It does not fork, since an initialised driver or a thread pool does not survive a fork.

    Args:
        function: a function of a module.
        arguments: plain values.
        timeout_s: seconds until it is ended.
    """
    with scratch_folder() as folder:
        send_call(folder, function, arguments)
        with Ranks(CALL_MODULE, [str(folder)], 1, shown=False) as ranks:
            (end,) = ranks.wait(timeout_s=timeout_s)
        outcome = read_outcome(folder, 0)
    if outcome is not None:
        return Isolated(None if outcome.problem else outcome.value(), outcome.problem)
    if end.ended_by_us:
        return Isolated(None, f"no answer within {timeout_s:.0f} s")
    return Isolated(None, f"the process ended with code {end.code} and without a message")
