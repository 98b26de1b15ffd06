"""Dims: the dimensions of a call's tensors by letters, from which its rules follow.

Dividing a letter shards every tensor that has it and leaves the others whole. Results that sum over it become
partial sums. ``None`` is a dimension that is never divided: the operator needs all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import Shard

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.rule import SUM, WHOLE, Placement, Rule

Letters = tuple[str | None, ...]


@dataclass(frozen=True)
class Dims:
    """The letters of a call.

    Attributes:
        inputs, outputs: letters of each tensor argument and result.
        summed: letters that are summed over, so results do not have them.
        added: indices of arguments added to the sum once, such as a bias; partial whenever the sum is.
        linear: groups of argument indices. The operator is linear in each group: partial sums stay partial.
        kernels: kernels, by the letter that is divided.
        fits: whether a rank's piece of a dimension may have a size; called with the letter and the size.
        why: the reason recorded in the table.
    """

    inputs: Sequence[Letters]
    outputs: Sequence[Letters]
    summed: Collection[str] = ()
    added: Collection[int] = ()
    linear: Sequence[Sequence[int]] = ()
    kernels: Mapping[str, str] = field(default_factory=dict)
    fits: Callable[[str, int], bool] = lambda letter, size: True
    why: str = ""

    def rules(self, call: Call, degree: int) -> Iterator[Rule]:
        """A rule for each letter that ``degree`` ranks can divide, and for each group of partial sums."""
        sides = list(zip((*self.inputs, *self.outputs), (*call.tensors, *call.outputs), strict=True))
        for letter in dict.fromkeys(letter for dims, _ in sides for letter in dims if letter is not None):
            # One letter may have several sizes: repeat_interleave and reshape change them.
            sizes = [spec.shape[dims.index(letter)] for dims, spec in sides if letter in dims]
            once = all(dims.count(letter) <= 1 for dims, _ in sides)  # no shard of a diagonal (ii->i)
            if once and all(
                size and size % degree == 0 and self.fits(letter, size // degree) for size in sizes
            ):
                yield self._rule_for_letter(letter)
        if all(spec.is_float for spec in call.outputs):  # casts to integers round: not linear
            for group in self.linear:
                if group and all(call.tensors[number].is_float for number in group):
                    inputs = (SUM if number in group else WHOLE for number in range(len(call.tensors)))
                    yield Rule((SUM,) * len(call.outputs), tuple(inputs), "linear in its summands")

    def _rule_for_letter(self, letter: str) -> Rule:
        partial = letter in self.summed

        def locate(dims: Letters, otherwise: Placement) -> Placement:
            return Shard(dims.index(letter)) if letter in dims else otherwise

        # A result without the letter is a sum over it, or its kernel makes it whole on every rank.
        outputs = tuple(locate(dims, SUM if partial else WHOLE) for dims in self.outputs)
        inputs = tuple(
            locate(dims, SUM if partial and number in self.added else WHOLE)  # a bias is added once in total
            for number, dims in enumerate(self.inputs)
        )
        return Rule(outputs, inputs, self.why, self.kernels.get(letter, ""))


Table = Callable[[Call], Dims | None]
"""Returns the dims of a call of an operator in a table; ``None`` if the call cannot be divided."""


def letters(count: int, start: str = "a") -> Letters:
    """``count`` different letters."""
    return tuple(chr(ord(start) + number) for number in range(count))


def but(dims: Letters, *frozen: int) -> Letters:
    """The letters, with ``None`` (never divided) at the given places."""
    places = {index % len(dims) for index in frozen} if dims else set()  # negative ones count from the back
    return tuple(None if index in places else letter for index, letter in enumerate(dims))


def broadcast(result: Sequence[int], dims: Letters, shape: Sequence[int]) -> Letters:
    """The letters of an argument that is broadcast to a result; ``None`` for repeated dimensions."""
    start = len(dims) - len(shape)  # shapes are aligned at their last dims
    rows = zip(dims[start:], shape, tuple(result)[start:], strict=True)
    return tuple(letter if size == full else None for letter, size, full in rows)  # size 1 is repeated


def frozen(call: Call, start: int = 0) -> list[Letters]:
    """Undivided dims of the tensor arguments from index ``start`` on."""
    return [(None,) * len(spec.shape) for spec in call.tensors[start:]]
