"""Grammar of annotations: a text becomes names with marks, by argument and result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from atorch_ns.errors import InputError


class Part(NamedTuple):
    """A name or fixed size; ``mark`` is ``+``, ``^`` or nothing."""

    name: str
    mark: str = ""

    def __str__(self) -> str:
        return self.name + self.mark


Dimension = tuple[Part, ...]
"""The parts of a dimension, more than one in brackets."""

Dimensions = tuple[Dimension, ...] | None
"""Those of a tensor; ``None`` for ``?``."""


def has_star(dims: Dimensions) -> bool:
    """Whether ``*`` is among the dimensions of a tensor."""
    return any(dim[0].name == "*" for dim in dims or ())


def refuse(text: str, place: int, problem: str) -> NoReturn:
    """Raises an InputError that points at a place of an annotation."""
    raise InputError(f"the annotation cannot be read: {problem}.\n  {text}\n  {' ' * place}^")


_TOKEN = re.compile(r"(?P<sign>->|[(),?])|(?P<name>\*|[^\W\d]\w*|\d+)(?P<mark>[+^]?)")


class Reader:
    """Reads an annotation from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._next = 0

    def sides(self) -> tuple[tuple[Dimensions, ...], tuple[Dimensions, ...]]:
        """The arguments and the results."""
        inputs = self._tensors("->")
        self._next += 1
        return inputs, self._tensors("")

    def _split(self) -> Iterator[tuple[int, str, str, str]]:
        """Start, sign, name and mark of each token, one of sign and name empty; an empty one ends them."""
        place = 0
        while place < len(self._text):
            if self._text[place].isspace():
                place += 1
                continue
            token = _TOKEN.match(self._text, place)
            if token is None:
                refuse(self._text, place, f"{self._text[place]!r} has no meaning here")
            yield place, token["sign"] or "", token["name"] or "", token["mark"] or ""
            place = token.end()
        yield len(self._text), "", "", ""

    def _fail(self, problem: str) -> NoReturn:
        refuse(self._text, self._tokens[self._next][0], problem)

    def _taken(self, sign: str) -> bool:
        found = self._tokens[self._next][1] == sign
        self._next += found
        return found

    def _tensors(self, end: str) -> tuple[Dimensions, ...]:
        found = [self._tensor()]
        while self._taken(","):
            found.append(self._tensor())
        _, sign, name, _ = self._tokens[self._next]
        if sign != end or name:
            self._fail(f"{sign or name!r} is not expected here" if sign or name else f"{end!r} is missing")
        return tuple(found)

    def _tensor(self) -> Dimensions:
        if self._taken("?"):
            return None
        dims: list[Dimension] = []
        while self._tokens[self._next][2] or self._tokens[self._next][1] == "(":
            dims.append(
                self._bracket() if self._taken("(") else (self._part(star=not has_star(tuple(dims))),)
            )
        if not dims:
            self._fail("a tensor's dimensions, or '?', are missing")
        return tuple(dims)

    def _bracket(self) -> Dimension:
        parts = []
        while self._tokens[self._next][2]:
            parts.append(self._part(star=False))
        if not parts or not self._taken(")"):
            self._fail("')' is missing" if parts else "names are missing in the brackets")
        return tuple(parts)

    def _part(self, *, star: bool) -> Part:
        _, _, name, mark = self._tokens[self._next]
        if name == "*" and not star:
            self._fail("'*' stands once in a tensor, and not in brackets")
        if name.isdecimal() and mark == "+":
            self._fail(f"the fixed size {name} cannot be summed over")
        self._next += 1
        return Part(name, mark)
