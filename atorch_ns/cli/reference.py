"""Writes the generated part of the page about the command line.

``python -m atorch_ns.cli.reference docs/command-line.md``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from atorch_ns.cli._reference import verbs_as_markdown
from atorch_ns.errors import InputError

__all__ = ["main", "with_verbs"]

_BEGIN: Final = "<!-- verbs: generated -->"
_END: Final = "<!-- verbs: end -->"


def with_verbs(page: str) -> str:
    """The page with its generated part written anew.

    Raises:
        InputError: if the page does not say where that stands.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise InputError(f"the page has no {_BEGIN} and {_END} to write between.")
    return f"{before}{_BEGIN}\n\n{verbs_as_markdown()}\n{_END}{after}"


def main() -> None:
    """Writes the page that the command names."""
    path = Path(sys.argv[1])
    path.write_text(with_verbs(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
