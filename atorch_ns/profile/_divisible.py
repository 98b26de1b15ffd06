"""What each stretch of a step has that can be divided: matrices, attentions, layers of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atorch_ns.profile._recorder import Event
from atorch_ns.profile._steps import Step

__all__ = ["Divisible", "kinds_of"]

_ATTENTION = "scaled_dot_product"
_SOFTMAX = "aten._softmax"


@dataclass(frozen=True)
class Divisible:
    """Of one stretch.

    Attributes:
        dims: for each parameter that tensor parallelism divides the dim; names relative to the block, full ones
            where the stretch is none.
        num_columns, num_rows: products in a forward pass, divided along their outputs and along their inputs.
        num_attentions: attentions in a forward pass.
        heads: of queries and of keys, the greatest that divides those of all its attentions; 0 where unknown.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    num_columns: int = 0
    num_rows: int = 0
    num_attentions: int = 0
    heads: tuple[int, int] = (0, 0)


def kinds_of(step: Step, merged: Sequence[int], firsts: Sequence[int]) -> list[Divisible]:
    """What can be divided of each stretch.

    Args:
        step: as recorded.
        merged: for each recorded stretch the number of the one it counts to.
        firsts: the first recorded stretch of each.
    """
    columns, rows, attentions = ([0] * len(firsts) for _ in range(3))
    for phase, count in step.division.columns.items():
        columns[merged[phase // 2]] += count
    for phase, count in step.division.rows.items():
        rows[merged[phase // 2]] += count
    for phase, count in _attentions(step).items():
        attentions[merged[phase // 2]] += count
    heads = _heads(step, merged)
    inside = tuple({f"{one.block}." for one in step.occurrences if one.block})
    found = []
    for number, first in enumerate(firsts):
        block = step.occurrences[first].block
        if block:
            own = {
                name.removeprefix(f"{block}."): dim
                for name, dim in step.dims.items()
                if name.startswith(f"{block}.")
            }
        else:
            own = {name: dim for name, dim in step.dims.items() if not name.startswith(inside)}
        found.append(
            Divisible(own, columns[number], rows[number], attentions[number], heads.get(number, (0, 0)))
        )
    return found


def _heads(step: Step, merged: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each stretch the heads of its fused attentions."""
    found: dict[int, tuple[int, int]] = {}
    phase = 0
    for event, (kind, key) in enumerate(zip(step.recording.kinds, step.recording.keys, strict=True)):
        if kind == Event.PHASE:
            phase = key
        elif event in step.recording.heads and phase % 2 == 0:
            queries, keys = found.get(merged[phase // 2], (0, 0))
            more = step.recording.heads[event]
            found[merged[phase // 2]] = (math.gcd(queries, more[0]), math.gcd(keys, more[1]))
    return found


def _attentions(step: Step) -> dict[int, int]:
    """For each forward phase its attentions: fused ones, else softmaxes over the last of four dims."""
    fused: dict[int, int] = {}
    softmaxes: dict[int, int] = {}
    phase = 0
    recording = step.recording
    for kind, key, name in zip(recording.kinds, recording.keys, recording.labels, strict=True):
        if kind == Event.PHASE:
            phase = key
        elif kind == Event.OPERATOR and phase % 2 == 0:
            if _ATTENTION in name:
                fused[phase] = fused.get(phase, 0) + 1
            elif name == _SOFTMAX:
                softmaxes[phase] = softmaxes.get(phase, 0) + 1
    return fused or softmaxes
