"""Failures as records for programs: ``--json``. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

__all__ = ["failure_record", "usage_error", "wants_json"]

_FLAG: Final = "--json"


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command's arguments ask for JSON; what is given to a script that is launched does not count."""
    verb = next((one for one in arguments if not one.startswith("-")), None)
    return verb != "launch" and _FLAG in arguments


def failure_record(error: str, code: int, rank: int | None = None) -> str:
    """What is printed on standard output in place of a result.

    Args:
        error: as people are told it.
        code: the exit code.
        rank: whose error it is; ``None`` if it was found before ranks were started, or without any.
    """
    record = {"schema": 1, "error": error, "code": code, "rank": rank}
    return json.dumps(record, indent=1, ensure_ascii=False)


def usage_error(end: SystemExit) -> str | None:
    """What the parser of options had to say where it ended the process; ``None`` if somebody else did."""
    message = getattr(end.__context__, "format_message", None)
    return str(message()) if callable(message) else None
