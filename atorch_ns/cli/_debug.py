"""Where ``--debug`` may stand: anywhere but among the arguments of a script that is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["split_debug"]

_FLAG: Final = "--debug"
_WITHOUT_VALUE: Final = ("--module", "-m", "--dry-run", "--help", _FLAG)


def split_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without ``--debug``, and whether it was there."""
    ours = len(arguments)
    if "launch" in arguments and not any(
        not one.startswith("-") for one in arguments[: arguments.index("launch")]
    ):
        ours = _script(arguments, arguments.index("launch") + 1)
    kept = [one for position, one in enumerate(arguments) if one != _FLAG or position >= ours]
    return kept, len(kept) < len(arguments)


def _script(arguments: Sequence[str], position: int) -> int:
    """Where the script stands among the arguments of ``launch``."""
    while position < len(arguments) and arguments[position].startswith("-"):
        alone = arguments[position] in _WITHOUT_VALUE or "=" in arguments[position]
        position += 1 if alone else 2
    return position
