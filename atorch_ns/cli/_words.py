"""Small words of messages. Imports nothing, for ``--help`` must stay light."""

from __future__ import annotations

__all__ = ["a_kind", "ended"]


def ended(text: str) -> str:
    """The text with one full stop, for messages of others that may bring their own."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def a_kind(value: object) -> str:
    """The value's type with its article: ``"an int"``, ``"a Tensor"``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"
