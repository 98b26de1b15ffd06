"""Dims: the dimensions of a call's tensors by letters, from which its rules follow.

Equal letters are one dimension. Dividing it shards every tensor that has it and leaves the others whole; results that sum over
it become partial sums. A letter that is ``None`` is never divided: the operator looks at all of it at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import Shard

from atorch_ns.operators.rules.rule import SUM, WHOLE, Call, Placement, Rule

Letters = tuple[str | None, ...]


@dataclass(frozen=True)
class Dims:
    """The letters of a call.

    Attributes:
        inputs, outputs: letters of each tensor argument and result.
        summed: letters that results lack because they are summed over.
        added: numbers of arguments that are added to a sum once, such as a bias: partial where the sum is.
        kernels: kernels, by the letter that is divided.
        why: the reason that the table gives.
    """

    inputs: Sequence[Letters]
    outputs: Sequence[Letters]
    summed: Collection[str] = ()
    added: Collection[int] = ()
    kernels: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    def rules(self, call: Call, degree: int) -> Iterator[Rule]:
        """A rule for each letter that ``degree`` ranks divide wherever it stands."""
        sides = list(zip((*self.inputs, *self.outputs), (*call.tensors, *call.outputs), strict=True))
        letters = dict.fromkeys(letter for dims, _ in sides for letter in dims if letter is not None)
        for letter in letters:
            sizes = [spec.shape[dims.index(letter)] for dims, spec in sides if letter in dims]
            if all(size and size % degree == 0 for size in sizes):
                yield self._rule(letter)

    def _rule(self, letter: str) -> Rule:
        partial = letter in self.summed

        def placed(dims: Letters, otherwise: Placement) -> Placement:
            return Shard(dims.index(letter)) if letter in dims else otherwise

        outputs = tuple(placed(dims, SUM if partial else WHOLE) for dims in self.outputs)
        inputs = tuple(
            placed(dims, SUM if partial and number in self.added else WHOLE)
            for number, dims in enumerate(self.inputs)
        )
        return Rule(outputs, inputs, self.why, self.kernels.get(letter, ""))


def letters(count: int, start: str = "a") -> Letters:
    """So many different letters."""
    return tuple(chr(ord(start) + number) for number in range(count))


def but(dims: Letters, *frozen: int) -> Letters:
    """The letters, those at the given places never divided."""
    places = {place % len(dims) for place in frozen} if dims else set()
    return tuple(None if place in places else letter for place, letter in enumerate(dims))


def broadcast(result: Sequence[int], dims: Letters, shape: Sequence[int]) -> Letters:
    """The letters of an argument that is broadcast to a result: none where it is repeated."""
    own = dims[len(dims) - len(shape) :]
    whole = tuple(result)[len(dims) - len(shape) :]
    return tuple(
        letter if size == full else None for letter, size, full in zip(own, shape, whole, strict=True)
    )
