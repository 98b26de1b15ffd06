"""Registrations that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opt_lib._replacements.registry import known_replacements, register_replace_pair, unregister_replace_pair


@pytest.fixture
def register() -> Iterator[Callable[..., Any]]:
    """``register_replace_pair`` whose registrations end with the test."""
    before = set(known_replacements())
    yield register_replace_pair
    for name in set(known_replacements()) - before:
        unregister_replace_pair(name)
