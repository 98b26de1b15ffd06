"""Style and template of the page. It loads nothing: no script, no font, no picture."""

from __future__ import annotations

from pathlib import Path


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_COLOURS, _PICTURES = _read("colours.css"), _read("pictures.css")

STYLE = _COLOURS + _read("layout.css") + _PICTURES + _read("print.css")
"""Style of the page."""

SVG_STYLE = f"{_COLOURS}{_PICTURES}.ground {{ fill: var(--bg); }}\n"
"""Style of a picture in a file of its own."""

PAGE = _read("page.html")
"""The page, a template of Jinja."""
