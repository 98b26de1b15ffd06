"""Where a browser may break labels, paths, names and figures: between their parts, not inside a word."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["LONGEST_PIECE", "breakable", "kept_together", "pieces"]

LONGEST_PIECE = 24
"""Characters that stay together: the width of the narrowest column of words."""

_AFTER = re.compile(r"(?<=\w\()(?=\S)|(?<=[,;])(?=\S)|(?<=\w[/.])(?=[^\W\d])")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-zµ])")
_INSIDE = re.compile(r"(?<=[_=:\-])(?=\w)|(?<=[a-z0-9])(?=[A-Z])")


def breakable(text: str) -> Markup:
    """The text, escaped, with ``<wbr/>`` wherever a line may end besides at spaces; no line begins with a plus."""
    from markupsafe import Markup

    return Markup("<wbr/>").join(pieces(text.replace(" + ", "\u00a0+ ")))


def kept_together(text: str) -> str:
    """Figures whose numbers stay on one line with their units."""
    return _BEFORE_UNIT.sub("\u00a0", text)


def pieces(text: str) -> list[str]:
    """The text in pieces that stay together at spaces only.

    A line may end after an opening parenthesis, a comma, a dot or a slash. Only a word that is longer than
    :data:`LONGEST_PIECE` is divided, at underscores and capitals where it has them.
    """
    return [part for piece in _AFTER.split(text) for part in _short(piece)]


def _short(piece: str) -> list[str]:
    words = re.split(r"(?<=\s)", piece)
    found = [""]
    for word in words:
        first, *more = _divided(word) if len(word.strip()) > LONGEST_PIECE else [word]
        found[-1] += first
        found += more
    return found


def _divided(word: str) -> list[str]:
    """Parts of a long word, each as long as may be."""
    found: list[str] = []
    for part in _INSIDE.split(word):
        if found and len(found[-1]) + len(part.rstrip()) <= LONGEST_PIECE:
            found[-1] += part
        else:
            found += [part[at : at + LONGEST_PIECE] for at in range(0, len(part), LONGEST_PIECE)]
    return found
