"""Suggestions for names that are almost right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence ``" Did you mean X or Y?"`` with the names most like ``name``; empty if none is.

    Example:
        >>> nearest("H100-80G", ["H100-80GB", "A100-80GB"])
        ' Did you mean H100-80GB?'
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    # Only what is nearly as close as the best: "H100-80G" means one device, not every one with 80.
    ratio = difflib.SequenceMatcher
    scores = {text: ratio(None, name.lower(), text).ratio() for text in close}
    best = max(scores.values(), default=0.0)
    chosen = [by_lower[text] for text in close if scores[text] >= best - 0.08]
    return f" Did you mean {' or '.join(chosen)}?" if chosen else ""
