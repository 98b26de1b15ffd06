"""Memo: what many kinds of plans have in common, found once in one pricing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["Memo"]

T = TypeVar("T")


class Memo:
    """Values by key, for as long as one table is priced.

    A key may hold the ``id`` of what this memo gave: it keeps everything alive.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, made where it is not known."""
        if key not in self._found:
            self._found[key] = make()
        value: T = self._found[key]
        return value
