"""Failures: exit codes, their texts for people, their JSON records for programs, and ``--debug``."""

from __future__ import annotations

import json
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
_WITHOUT_VALUE: Final = ("--module", "-m", "--dry-run", "--help", _DEBUG)  # options of launch without a value


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
    if "launch" in arguments and not any(
        not argument.startswith("-") for argument in arguments[: arguments.index("launch")]
    ):  # launch is the verb only where options alone precede it
        ours = _find_script_position(arguments, arguments.index("launch") + 1)
    rest = [argument for position, argument in enumerate(arguments) if argument != _DEBUG or position >= ours]
    return rest, len(rest) < len(arguments)


def _find_script_position(arguments: Sequence[str], position: int) -> int:
    while position < len(arguments) and arguments[position].startswith("-"):
        alone = arguments[position] in _WITHOUT_VALUE or "=" in arguments[position]
        position += 1 if alone else 2  # an option, and its value
    return position


def wants_json(arguments: Sequence[str]) -> bool:
    """Returns whether a command's arguments contain ``--json``; those of a launched script do not count."""
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    return verb != "launch" and "--json" in arguments


def failure_record(error: str, code: int, rank: int | None = None) -> str:
    """JSON record printed in place of a result: the text, the exit code, and the rank that failed, if any."""
    record = {"schema": 1, "error": error, "code": code, "rank": rank}
    return json.dumps(record, indent=1, ensure_ascii=False)


def usage_error(end: SystemExit) -> str | None:
    """Message of the option parser where it ended the process; ``None`` if something else did."""
    message = getattr(end.__context__, "format_message", None)  # of click's error
    return str(message()) if callable(message) else None
