"""How a job keeps gradients from being synchronised while micro-batches accumulate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

__all__ = ["SkipSync", "never_synchronised"]

SkipSync = Callable[[], AbstractContextManager[None]]
"""Gives a context in which backward passes add to local gradients and communicate nothing."""


def never_synchronised() -> AbstractContextManager[None]:
    """For jobs whose gradients stay on one rank."""
    return nullcontext()
