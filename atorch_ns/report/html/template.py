"""Style and template of the page. It loads nothing: no script, no font, no picture."""

from __future__ import annotations

from pathlib import Path


def _read_file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_COLOURS, _PICTURES = _read_file("colours.css"), _read_file("pictures.css")

STYLE = _COLOURS + _read_file("layout.css") + _PICTURES + _read_file("print.css")
"""Style of the page."""

SVG_STYLE = f"{_COLOURS}{_PICTURES}.ground {{ fill: var(--bg); }}\n"
"""Style of a picture in a file of its own."""

PAGE = _read_file("page.html")
"""The page, a template of Jinja."""
