"""``atorch-ns env``: what to paste into an issue."""

from __future__ import annotations

import json
from typing import Any

import typer

from atorch_ns.cli._options import AsJson

__all__ = ["env"]


def env(as_json: AsJson = False) -> None:
    """Print versions, devices and limits, to be pasted into an issue. No secrets, host names or paths.

    Example: atorch-ns env
    """
    from atorch_ns.doctor import environment

    found = environment()
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for title, value in found.items():
        if title != "schema":
            typer.echo("\n".join(_lines(title, value)))


def _lines(title: str, value: Any) -> list[str]:
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return [line for number, each in enumerate(value) for line in _lines(f"{title}[{number}]", each)]
    if not isinstance(value, dict):
        return [f"{title}: {_word(title, value)}"]
    return [
        f"{title}:",
        *(f"  {key.removesuffix('_bytes')}: {_word(key, each)}" for key, each in value.items()),
    ]


def _word(key: str, value: Any) -> str:
    if value is None:
        return "no limit" if key.endswith(("_bytes", "_cores", "_files")) or key == "open_files" else "none"
    if key.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
