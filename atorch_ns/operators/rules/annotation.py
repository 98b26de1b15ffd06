"""Annotations: dimensions of an operator's arguments and results in nnScaler's form ``m k+, n k+ -> m n``.

=========  =================================================================================================
``k``      may be divided; every result must have it
``k+``     may be divided; results that lack it become partial sums
``k^``     is never divided, wherever else it stands
``(a b)``  one dimension of size ``a·b``; of its names only the first whose size is not 1 may be divided
``*``      any number of dimensions, equal or broadcast from the right among the tensors that have it
``?``      an argument that is not a tensor, or one that stays whole, as does such a result
``8``      a fixed size, never divided; ``1`` alone is also a tensor without dimensions
=========  =================================================================================================

Dividing a name shards every tensor that has it and leaves other arguments whole. That is right for a factor
``s`` in ``(x * s) @ w``. It is wrong for a bias: ``m k+, n k+, n -> m n`` would add it once on every rank. An
annotation cannot tell the two apart. The check of a division refuses the wrong one; freeze ``k^`` there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from torch.distributed.tensor import Shard

from atorch_ns.errors import InputError
from atorch_ns.operators.rules.rule import SUM, WHOLE, Placement, Rule


class AnnotationPart(NamedTuple):
    """A name or fixed size; ``mark`` is ``+``, ``^`` or nothing."""

    name: str
    mark: str = ""

    def __str__(self) -> str:
        return self.name + self.mark


Dimension = tuple[AnnotationPart, ...]
"""The parts of a dimension, more than one in brackets."""

Dimensions = tuple[Dimension, ...] | None
"""The dimensions of a tensor; ``None`` for ``?``."""


def has_star(dims: Dimensions) -> bool:
    """Whether ``*`` is among the dimensions of a tensor."""
    return any(dim[0].name == "*" for dim in dims or ())


def refuse(text: str, position: int, problem: str) -> NoReturn:
    """Raises an InputError that points at a place of an annotation."""
    raise InputError(f"the annotation cannot be read: {problem}.\n  {text}\n  {' ' * position}^")


_TOKEN = re.compile(r"(?P<sign>->|[(),?])|(?P<name>\*|[^\W\d]\w*|\d+)(?P<mark>[+^]?)")


class AnnotationReader:
    """Reads an annotation from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split_tokens())
        self._next = 0  # index of the token to read

    def sides(self) -> tuple[tuple[Dimensions, ...], tuple[Dimensions, ...]]:
        """The arguments and the results."""
        inputs = self._read_tensors("->")
        self._next += 1  # the arrow, for which _read_tensors has looked
        return inputs, self._read_tensors("")

    def _split_tokens(self) -> Iterator[tuple[int, str, str, str]]:
        # (start, sign, name, mark) of each token; one of sign and name is empty.
        position = 0
        while position < len(self._text):
            if self._text[position].isspace():
                position += 1
                continue
            token = _TOKEN.match(self._text, position)
            if token is None:
                refuse(self._text, position, f"{self._text[position]!r} has no meaning here")
            yield position, token["sign"] or "", token["name"] or "", token["mark"] or ""
            position = token.end()
        yield len(self._text), "", "", ""  # the end: neither sign nor name

    def _refuse_token(self, problem: str) -> NoReturn:
        refuse(self._text, self._tokens[self._next][0], problem)

    def _take_sign(self, sign: str) -> bool:
        matches = self._tokens[self._next][1] == sign
        self._next += matches
        return matches

    def _read_tensors(self, end: str) -> tuple[Dimensions, ...]:
        tensors = [self._read_tensor()]
        while self._take_sign(","):
            tensors.append(self._read_tensor())
        _, sign, name, _ = self._tokens[self._next]
        if sign != end or name:  # the end of the text is a token with an empty sign
            self._refuse_token(
                f"{sign or name!r} is not expected here" if sign or name else f"{end!r} is missing"
            )
        return tuple(tensors)

    def _read_tensor(self) -> Dimensions:
        if self._take_sign("?"):
            return None
        dims: list[Dimension] = []
        while self._tokens[self._next][2] or self._tokens[self._next][1] == "(":
            dims.append(
                self._read_bracket()
                if self._take_sign("(")
                else (self._read_part(star=not has_star(tuple(dims))),)  # one `*` in each tensor
            )
        if not dims:
            self._refuse_token("a tensor's dimensions, or '?', are missing")
        return tuple(dims)

    def _read_bracket(self) -> Dimension:
        parts = []
        while self._tokens[self._next][2]:
            parts.append(self._read_part(star=False))
        if not parts or not self._take_sign(")"):
            self._refuse_token("')' is missing" if parts else "names are missing in the brackets")
        return tuple(parts)

    def _read_part(self, *, star: bool) -> AnnotationPart:
        _, _, name, mark = self._tokens[self._next]
        if name == "*" and not star:
            self._refuse_token("'*' stands once in a tensor, and not in brackets")
        if name.isdecimal() and mark == "+":
            self._refuse_token(f"the fixed size {name} cannot be summed over")
        self._next += 1
        return AnnotationPart(name, mark)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Annotation:
    """The dimensions of each argument and result, read from a text."""

    text: str
    inputs: tuple[Dimensions, ...]
    outputs: tuple[Dimensions, ...]

    @classmethod
    def read(cls, text: str) -> Annotation:
        """Reads an annotation from a text.

        Raises:
            InputError: pointing at the place where it cannot be read.
        """
        inputs, outputs = AnnotationReader(text).sides()
        names = {part.name for dims in inputs for dim in dims or () for part in dim}
        for dims in outputs:
            for part in (part for dim in dims or () for part in dim):
                if part.name not in names and not part.name.isdecimal():  # a fixed size needs no argument
                    at = re.compile(rf"(?<!\w){re.escape(part.name)}(?!\w)").search(text, text.index("->"))
                    refuse(text, at.start() if at else 0, f"no argument has {part.name!r}")
        return cls(text, inputs, outputs)

    def shapes(self, inputs: Sequence[Shape | None], **sizes: int) -> tuple[Shape | None, ...]:
        """The shapes of the results; ``None`` for ``?``.

        Args:
            inputs: shape of each argument, ``None`` where it is not a tensor.
            sizes: sizes by name, for names in brackets that no argument determines.

        Raises:
            InputError: if the shapes do not fit the annotation.
        """
        full_form, all_sizes = self._measure_sizes(inputs, sizes)
        return tuple(
            None
            if dims is None
            else ()
            if dims == ((AnnotationPart("1"),),) or dims == ((AnnotationPart("1", "^"),),)
            else tuple(math.prod(_part_size(part, all_sizes) for part in dim) for dim in dims)
            for dims in full_form.outputs
        )

    def rules(self, inputs: Sequence[Shape | None], degree: int, **sizes: int) -> tuple[Rule, ...]:
        """One rule for each name that may be divided and whose size ``degree`` divides.

        A name among ``sizes`` is not divided, because the function would use the whole size on a piece.

        Args:
            inputs: shape of each argument; ``None`` for one that is not a tensor and has no placement.
            sizes: sizes by name.

        Raises:
            InputError: if the shapes do not fit the annotation.
        """
        full_form, all_sizes = self._measure_sizes(inputs, sizes)
        tensors = [dims for dims, shape in zip(full_form.inputs, inputs, strict=True) if shape is not None]
        marks = full_form.marks
        candidates = (
            _rule_for_name(name, marks[name], tensors, full_form.outputs, sizes=all_sizes, text=self.text)
            for name, size in all_sizes.items()
            if name in marks and "^" not in marks[name] and name not in sizes  # one ^ freezes all places
            if degree > 1 and size and size % degree == 0
        )
        return tuple(rule for rule in candidates if rule is not None)

    @property
    def marks(self) -> dict[str, str]:
        """The marks of each name, from all of its places."""
        by_name: dict[str, str] = {}
        for dims in (*self.inputs, *self.outputs):
            for part in (part for dim in dims or () for part in dim if not part.name.isdecimal()):
                by_name[part.name] = by_name.get(part.name, "") + part.mark
        return by_name

    def _measure_sizes(
        self, inputs: Sequence[Shape | None], sizes: Mapping[str, int]
    ) -> tuple[Annotation, dict[str, int]]:
        if len(inputs) != len(self.inputs):
            raise InputError(
                f"the annotation {self.text!r} has {len(self.inputs)} arguments, but {len(inputs)} were given."
            )
        try:
            full_form = self._expand_stars(inputs)
            return full_form, _Sizes(sizes).of(full_form.inputs, inputs)
        except InputError as error:
            shapes = ", ".join("?" if shape is None else str(list(shape)) for shape in inputs)
            raise InputError(f"the annotation {self.text!r} does not fit {shapes}: {error}") from error

    def _expand_stars(self, inputs: Sequence[Shape | None]) -> Annotation:
        # `*1` is the last dimension of `*` and `*2` the one before, since broadcasting aligns from the right.
        counts = [
            0 if dims is None or shape is None else len(shape) - len(dims) + 1
            for dims, shape in zip(self.inputs, inputs, strict=True)
        ]
        star_counts = [count for dims, count in zip(self.inputs, counts, strict=True) if has_star(dims)]
        most = max(star_counts, default=0)  # dimensions of `*` in results
        if min(star_counts, default=0) < 0:
            raise InputError("an argument has too few dimensions.")
        full = {number: size for number, size in self._star_sizes(inputs, counts).items() if size != 1}

        def expand_dims(dims: Dimensions, count: int, shape: Shape | None = None) -> Dimensions:
            if dims is None or not has_star(dims):
                return dims
            position = next(position for position, dim in enumerate(dims) if dim[0].name == "*")
            (star,) = dims[position]
            numbers = range(count, 0, -1)  # the outermost dimension first
            parts = [(AnnotationPart(f"*{number}", star.mark),) for number in numbers]
            for index, number in enumerate(numbers):  # broadcast here: repeated, so not divided
                if shape is not None and number in full and shape[position + index] == 1:
                    parts[index] = (AnnotationPart("1"),)
            return (*dims[:position], *parts, *dims[position + 1 :])

        arguments = tuple(map(expand_dims, self.inputs, counts, inputs))
        return Annotation(self.text, arguments, tuple(expand_dims(dims, most) for dims in self.outputs))

    def _star_sizes(self, inputs: Sequence[Shape | None], counts: Sequence[int]) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for dims, shape, count in zip(self.inputs, inputs, counts, strict=True):
            if dims is not None and shape is not None and has_star(dims):
                position = next(position for position, dim in enumerate(dims) if dim[0].name == "*")
                for index, size in enumerate(shape[position : position + count]):
                    sizes[count - index] = max(sizes.get(count - index, size), size)
        return sizes


def _part_size(part: AnnotationPart, sizes: Mapping[str, int]) -> int:
    return int(part.name) if part.name.isdecimal() else sizes[part.name]


class _Sizes:
    """The known sizes of names."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)

    def of(self, inputs: Sequence[Dimensions], shapes: Sequence[Shape | None]) -> dict[str, int]:
        """All sizes, from the shapes of the arguments."""
        waiting: list[tuple[Dimension, int, str]] = []  # dimension, its size, its argument
        for number, (dims, shape) in enumerate(zip(inputs, shapes, strict=True)):
            where = f"argument {number}"
            if dims is None or (shape == () and [part.name for dim in dims for part in dim] == ["1"]):
                continue
            if shape is None:
                raise InputError(f"{where} is not a tensor. Write ? for it.")
            if len(dims) != len(shape):
                raise InputError(f"{where} has {len(shape)} dimensions instead of {len(dims)}.")
            waiting += [(dim, size, where) for dim, size in zip(dims, shape, strict=True)]
        while waiting:  # a bracket waits until all its names but one are known
            later = [item for item in waiting if not self._learn_sizes(*item)]
            if len(later) == len(waiting):  # this round has learnt no size
                dim, size, where = later[0]
                raise InputError(
                    f"the sizes of ({' '.join(map(str, dim))}), together {size} in {where}, are not known. Give the "
                    "function an argument named after one of them."
                )
            waiting = later
        return self._sizes

    def _learn_sizes(self, dim: Dimension, size: int, where: str) -> bool:
        unknown = [part for part in dim if not part.name.isdecimal() and part.name not in self._sizes]
        if len(unknown) > 1:
            return False
        rest = math.prod(_part_size(part, self._sizes) for part in dim if part not in unknown)
        if unknown and rest and size % rest == 0:
            self._sizes[unknown[0].name] = size // rest
        elif unknown or rest != size:  # not a multiple, or another size than elsewhere
            dim_text = " ".join(part.name for part in dim)
            raise InputError(
                f"{dim_text} is {size} in {where}, and {'a multiple of ' if unknown else ''}{rest} elsewhere."
            )
        return True


def _rule_for_name(
    name: str,
    marks: str,
    inputs: Sequence[Dimensions],
    outputs: Sequence[Dimensions],
    *,
    sizes: Mapping[str, int],
    text: str,
) -> Rule | None:
    has_sum = "+" in marks

    def placement(dims: Dimensions, otherwise: Placement | None) -> Placement | None:
        if dims is None:
            return WHOLE
        places = [index for index, dim in enumerate(dims) if any(part.name == name for part in dim)]
        if not places:
            return otherwise
        # A contiguous piece of (h t) is a piece of h, or of t where h is 1.
        first = next((part for part in dims[places[0]] if _part_size(part, sizes) != 1), None)
        alone = len(places) == 1 and first is not None and first.name == name
        return Shard(places[0]) if alone else None  # None: no rule for this name

    args = [placement(dims, WHOLE) for dims in inputs]
    results = [placement(dims, SUM if has_sum else None) for dims in outputs]  # a result without it needs +
    if any(entry is None for entry in (*results, *args)):
        return None
    outputs_at, inputs_at = (tuple(entry for entry in side if entry is not None) for side in (results, args))
    return Rule(outputs_at, inputs_at, source=f"{name} of the annotation {text}")
