"""Small words of messages. Imports nothing, for ``--help`` must stay light."""

from __future__ import annotations

__all__ = ["a_kind", "counted", "ended", "told"]


def ended(text: str) -> str:
    """The text with one full stop, for messages of others that may bring their own."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def counted(number: int, word: str, plural: str = "") -> str:
    """A number and its word: ``"1 rank"``, ``"2 ranks"``."""
    return f"{number} {word if number == 1 else plural or f'{word}s'}"


def told(error: BaseException) -> str:
    """An exception with what it says, if it says something: ``"ValueError: no corpus"``, ``"SystemExit"``."""
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}" if text else name


def a_kind(value: object) -> str:
    """The value's type with its article: ``"an int"``, ``"a Tensor"``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"
