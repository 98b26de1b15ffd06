"""Every verb of the command, found in the command itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from atorch_ns.cli import app

__all__ = ["VERBS", "commands"]


def commands() -> dict[str, Any]:
    """Each verb, as ``"strategy show"``, with what runs it."""
    return dict(_walk(typer.main.get_command(app), ""))


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for key, each in inner.items():
        yield from _walk(each, f"{name} {key}".strip())


VERBS = tuple(commands())
