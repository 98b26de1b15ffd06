"""A number and where it comes from."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Figure"]


class Figure(NamedTuple):
    """A figure of a data sheet.

    Attributes:
        value: in the unit that its place names.
        source: the title of the data sheet, or what was assumed and why.
    """

    value: float
    source: str
