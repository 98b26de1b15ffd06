"""Rules: how one call of an operator may be divided over the ranks of an axis.

A rule gives each tensor argument and result one of torch's placements: ``Replicate`` (whole on all ranks),
``Shard(d)`` (equal pieces along ``d``, by rank) or ``Partial`` (the whole is the sum over the ranks). In text
a shard is its dimension: ``1 <- 2,1,R`` has its result divided along 1, its first argument along 2.

Gradients follow: that of a shard is divided alike, that of a partial sum is whole on every rank. If a rule
divides anything, each rank has a part of the gradient of a replicated argument, and the conversion before it
sums them (:mod:`~atorch_ns.operators.divided.conversions`). So rules are about the forward pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.distributed.tensor import Partial, Replicate, Shard

from atorch_ns.capture.graph.call import Call
from atorch_ns.errors import InputError

Placement = Replicate | Shard | Partial

WHOLE = Replicate()
SUM = Partial()  # torch's default reduction of partial sums


def placement_text(placement: Placement) -> str:
    """``R``, ``P``, or the dimension of a shard."""
    if isinstance(placement, Shard):
        return str(placement.dim)
    return "R" if isinstance(placement, Replicate) else "P"


def read_placement(text: str) -> Placement:
    """Reads a placement from a text that :func:`placement_text` returned.

    Raises:
        InputError: for another text.
    """
    word = text.strip()
    if word.isdecimal():  # no sign: rules count dimensions from the front
        return Shard(int(word))
    if word not in ("R", "P"):
        raise InputError(
            f"{text!r} is not a placement. Write R, P, or the number of the dimension that is divided."
        )
    return WHOLE if word == "R" else SUM


@dataclass(frozen=True)
class Rule:
    """One way to divide a call.

    Attributes:
        outputs: placements of its results, in order.
        inputs: placements of its tensor arguments, in the order of :attr:`Call.tensors`.
        source: the origin and the reason of the rule, in a few words.
        kernel: function of :mod:`~atorch_ns.operators.divided.kernels` that runs instead; empty for none.
    """

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]
    source: str = field(default="", compare=False)  # not compared: a plan's file has only placements
    kernel: str = field(default="", compare=False)

    def __str__(self) -> str:
        return " <- ".join(",".join(map(placement_text, side)) for side in (self.outputs, self.inputs))

    @classmethod
    def read(cls, text: str) -> Rule:
        """Reads a rule from a text that ``str(rule)`` returned.

        Raises:
            InputError: if the text is not a rule.
        """
        outputs, arrow, inputs = text.partition("<-")
        if not arrow:
            raise InputError(
                f"{text!r} is not a rule. Write placements of results and arguments, as in '1 <- 2,1,R'."
            )
        results, arguments = (
            tuple(read_placement(part) for part in side.split(",") if part.strip())  # a factory has no input
            for side in (outputs, inputs)
        )
        return cls(results, arguments)

    @cached_property
    def divides(self) -> bool:
        """Whether the rule divides anything. If not, every rank computes the same."""
        return any(not isinstance(placement, Replicate) for placement in (*self.outputs, *self.inputs))


def whole_rule(call: Call) -> Rule:
    """The rule that divides nothing."""
    return Rule((WHOLE,) * len(call.outputs), (WHOLE,) * len(call.tensors), "nothing is divided")


Rules = Callable[[Call, int], Sequence[Rule]]
"""``(call, degree) -> rules``: the rules that divide a call over ``degree`` ranks, no :func:`whole_rule`."""
