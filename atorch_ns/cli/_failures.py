"""Failures: exit codes, their texts for people, their JSON records for programs, and ``--debug``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from atorch_ns.errors import (
    AtorchError,
    BackendError,
    CoordinatorError,
    InputError,
    LayoutError,
    MissingPackageError,
    SearchError,
    StrategyError,
)

_DEBUG: Final = "--debug"
# Options of launch whose value comes next, unlike those of -n2, -mn2 and --nproc=2; -- has none.
_TAKES_NEXT: Final = re.compile(r"-m*n|--(?!(module|dry-run|help|debug)$)[^=]+")


def exit_code(error: BaseException) -> int:
    """1 failed, 2 usage (also a strategy that cannot be read or used), 3 infeasible, 4 environment."""
    if isinstance(error, SearchError):  # no strategy fits
        return 3
    if isinstance(error, (BackendError, CoordinatorError, MissingPackageError)):
        return 4
    return 2 if isinstance(error, (InputError, LayoutError, StrategyError)) else 1


def describe(error: BaseException) -> str:
    """An error in a line or more, for people."""
    if isinstance(error, AtorchError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}. --debug shows where."


def split_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without ``--debug``, and whether it was among them."""
    ours = len(arguments)  # arguments from this index on are a script's
    if _find_verb(arguments) == "launch":
        ours = _find_script_position(arguments, arguments.index("launch") + 1)
    rest = [argument for position, argument in enumerate(arguments) if argument != _DEBUG or position >= ours]
    return rest, len(rest) < len(arguments)


def _find_script_position(arguments: Sequence[str], position: int) -> int:
    while position < len(arguments) and arguments[position].startswith("-"):
        position += 2 if _TAKES_NEXT.fullmatch(arguments[position]) else 1
    return position


def wants_json(arguments: Sequence[str]) -> bool:
    """Returns whether a command's arguments contain ``--json``; those of a launched script do not count."""
    return _find_verb(arguments) != "launch" and "--json" in arguments


def _find_verb(arguments: Sequence[str]) -> str | None:
    # Options alone precede the verb.
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def failure_record(error: str, code: int, rank: int | None = None) -> str:
    """JSON record printed in place of a result: the text, the exit code, and the rank that failed, if any."""
    record = {"schema": 1, "error": error, "code": code, "rank": rank}
    return json.dumps(record, indent=1, ensure_ascii=False)


def usage_error(end: SystemExit) -> str | None:
    """Message of the option parser where it ended the process; ``None`` if something else did."""
    message = getattr(end.__context__, "format_message", None)  # of click's error
    return str(message()) if callable(message) else None
