"""Sizes that divide, for messages about sizes that do not."""

from __future__ import annotations

__all__ = ["nearest_sizes"]


def nearest_sizes(size: int, divisor: int) -> str:
    """The advice that names the positive multiples of ``divisor`` next to ``size``."""
    below = size // divisor * divisor
    above = below + divisor
    if not below:
        return f"The nearest size that divides is {above}."
    return f"The nearest sizes that divide are {below} and {above}."
