"""Micro-batches of a step: what each counts, and what comes of them.

Legend: l_i the loss of a micro-batch, w_i its weight, n the number of data ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from atorch_ns.capture.nests import tensors_of
from atorch_ns.cluster import gather_values
from atorch_ns.errors import InputError
from atorch_ns.text import clip_text, count_noun, with_article

LossScale = Callable[[torch.Tensor], torch.Tensor]
"""Transforms a loss, 0-d, before its backward pass."""

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a rank in a step.

    Attributes:
        micro_batches: micro-batches on this rank's device.
        shares: factors of the losses for the backward pass, before gradients are averaged over data ranks.
        counts: w_i as a share of the step's loss, which is ``sum(counts[i] * l_i)`` over all data ranks.
        dummies: indices of micro-batches that count nothing and only keep this rank in step with others.
        scale_fn: transforms a loss before it is multiplied.
        wants_outputs: whether this rank wants the model's outputs.
        askers: the ranks of the job that want them.
    """

    micro_batches: Sequence[Any]
    shares: Sequence[float]
    counts: Sequence[float]
    dummies: frozenset[int] = frozenset()
    scale_fn: LossScale | None = None
    wants_outputs: bool = False
    askers: frozenset[int] = frozenset()

    @classmethod
    def mean(cls, micro_batches: Sequence[Any], num_data_ranks: int) -> StepWork:
        """The mean of equally sized micro-batches, whose number is the same on all data ranks."""
        num = len(micro_batches)
        return cls(
            micro_batches=micro_batches, shares=[1.0 / num] * num, counts=[1.0 / num / num_data_ranks] * num
        )

    def share(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        """The initial gradient for the backward pass of a loss."""
        if self.scale_fn is not None:
            loss = self.scale_fn(loss)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise InputError(
                    f"scale_fn must return the scaled loss as a tensor of one number. It returned {with_article(loss)}."
                )
        if number in self.dummies:  # its loss may be any value, even infinite
            return (loss * 0.0).nan_to_num(0.0, 0.0, 0.0)
        return loss if self.shares[number] == 1.0 else loss * self.shares[number]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Results of a rank's micro-batches.

    Attributes:
        losses: [m] float32, detached, as returned by the loss function. 0 for dummies. The same on all ranks
            that work on the same samples.
        outputs: the model's detached outputs if wanted and present on this rank. Empty for dummies.
    """

    losses: torch.Tensor
    outputs: tuple[Any, ...] = ()


class BatchRunner(Protocol):
    """Runs micro-batches through a model of which this rank holds a part: a pipeline or another engine.

    All ranks of the part's group call it together, with the same micro-batches.
    """

    def forward_backward(self, work: StepWork) -> Passed:
        """Adds the gradients of all losses, multiplied by their shares."""

    def forward(self, work: StepWork) -> Passed:
        """Like :meth:`forward_backward`, without gradients."""


def weigh(
    samples: Sequence[Any],
    *,
    weights: Sequence[float] | None,
    losses: Literal["means", "sums"],
    reduction: Reduction,
    dummies: Sequence[bool] | None,
    outputs: bool,
    functions: Mapping[str, Callable[..., Any] | None],
    data_ranks: tuple[int, int] | None,
    device: torch.device,
) -> tuple[list[Any], dict[str, Any]]:
    """Micro-batches with shares, padded to the largest number on any data rank. Collective over all ranks.

    Args:
        samples: micro-batches of this rank.
        weights: w_i; ``None`` for 1 each.
        losses: whether l_i is a mean over the items that w_i counts, or a sum.
        reduction: whether the step's loss is a mean over the items counted by weights on all ranks, or a sum.
        dummies: flags of micro-batches that count nothing; ``None`` for none.
        outputs: whether this rank wants the model's outputs.
        functions: the step's given functions by name. A ``divisor`` is on all ranks or on none.
        data_ranks: this rank's index among the data ranks and their number; ``None`` for a single rank.

    Returns:
        The micro-batches, and the other fields of :class:`StepWork`.

    Raises:
        InputError: on all ranks, if samples are not a list, weights do not fit them, are negative or sum to 0, a
            rank has no micro-batch, or ranks with the same data have different numbers or weights.
    """
    num = len(samples) if isinstance(samples, (list, tuple)) else 0
    data_rank, n = data_ranks or (0, 1)
    numbers = [1.0] * num if weights is None else _weight_numbers(weights)
    idle = [False] * num if dummies is None else _weight_numbers(dummies)
    problem = _find_problem(samples, weights, losses, reduction, dummies=dummies, functions=functions)
    # Report wrong arguments to the other ranks, which must not wait in the all-gather.
    numbers, idle = numbers or [], [bool(flag) for flag in idle or ()]
    net_weights = [0.0 if is_idle else weight for weight, is_idle in zip(numbers, idle, strict=False)]
    digest = _work_digest(losses, reduction, idle, [] if problem else samples)
    divides = functions.get("divisor") is not None
    words = [data_rank, num, sum(net_weights), bool(problem), bool(outputs), digest, divides]
    message = torch.tensor(words, dtype=torch.float64, device=device)  # exact: the digest has 48 bits of 53
    every = [message]
    if data_ranks is not None:
        every = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(every, message)
    rows = torch.stack(every).tolist()  # [ranks, 7]
    by_place = {row[0]: row for row in rows}  # ranks that work on the same data count once
    bad_ranks = [rank for rank, row in enumerate(rows) if row[3]]
    if bad_ranks:
        problems = [problem] if data_ranks is None else gather_values(problem, distributed=True)
        raise InputError(f"{problem or f'rank {bad_ranks[0]}: {problems[bad_ranks[0]]}'}.")
    _refuse_unlike(rows)
    most, total = max(row[1] for row in rows), sum(row[2] for row in by_place.values())
    if reduction == "mean" and total <= 0.0:
        raise InputError(
            "the weights of all micro-batches sum to zero, so the mean of their losses is undefined."
        )
    missing = int(most) - num  # dummies: all ranks run the same number of forwards and collectives
    factors = net_weights if losses == "means" else [float(not is_idle) for is_idle in idle]
    divisor = total if reduction == "mean" else 1.0
    counts = [factor / divisor for factor in factors] + [0.0] * missing
    idle += [True] * missing
    return [*samples, *[samples[-1]] * missing], {
        "shares": [n * count for count in counts],  # gradients are averaged over n data ranks afterwards
        "counts": counts,
        "dummies": frozenset(number for number, flag in enumerate(idle) if flag),
        "wants_outputs": outputs,
        "askers": frozenset(rank for rank, row in enumerate(rows) if row[4]),
    }


def _find_problem(
    samples: Any,
    weights: Any,
    losses: str,
    reduction: str,
    *,
    dummies: Any,
    functions: Mapping[str, Callable[..., Any] | None],
) -> str:
    if not isinstance(samples, (list, tuple)):
        return f"samples is a list of micro-batches, and not {with_article(samples)}"
    if losses not in ("means", "sums") or reduction not in ("mean", "sum"):
        return f"losses are 'means' or 'sums', and reduction is 'mean' or 'sum'; they are {losses!r} and {reduction!r}"
    numbers = [1.0] * len(samples) if weights is None else _weight_numbers(weights)
    if numbers is None:
        return f"weights is a list of numbers, one for each sample, and is {clip_text(repr(weights), 80)}"
    idle = None if dummies is None else _weight_numbers(dummies)
    if dummies is not None and idle is None:
        return f"dummies is a list of flags, one for each sample, and is {clip_text(repr(dummies), 80)}"
    for name, function in functions.items():
        if not (function is None or callable(function)):
            return f"{name} must be a function, and is {with_article(function)}"
    return _find_misfit(len(samples), numbers, idle)


def _refuse_unlike(rows: Sequence[Sequence[float]]) -> None:
    # The columns are those of `words` in weigh.
    by_place = {row[0]: row for row in rows}
    divides = [row[6] for row in rows]
    if len(set(divides)) > 1:
        raise InputError(
            f"divisor was given on rank {divides.index(1.0)}, but not on rank {divides.index(0.0)}."
        )
    for rank, row in enumerate(rows):
        other = by_place[row[0]]
        both = f"ranks {rank} and {rows.index(other)} work on the same data and must be given the same micro-batches, but"
        if row[1:3] != other[1:3]:
            raise InputError(
                f"{both} have {row[1]:.0f} of total weight {row[2]:g} and {other[1]:.0f} of total weight {other[2]:g}."
            )
        if row[5] != other[5]:
            raise InputError(f"{both} differ in their shapes, or in losses, reduction or dummies.")


def _find_misfit(num: int, weights: Sequence[float], idle: Sequence[float] | None) -> str:
    if len(weights) != num or len(idle or weights) != num:
        flags = "" if idle is None else f" and {count_noun(len(idle), 'dummy flag')}"
        return f"there are {count_noun(num, 'sample')}, {count_noun(len(weights), 'weight')}{flags}"
    if not all(0.0 <= weight < float("inf") for weight in weights):
        return f"weights must be numbers from 0 on, and are {list(weights)}"
    return "" if num else "a rank has no micro-batch, not even one to be a dummy"


def _weight_numbers(weights: Sequence[float]) -> list[float] | None:
    try:
        return [float(weight) for weight in weights]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError of a tensor of several numbers
        return None


def _work_digest(losses: str, reduction: str, idle: Sequence[bool], samples: Sequence[Any]) -> int:
    shapes = [
        [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_of(sample)] for sample in samples
    ]
    text = repr((losses, reduction, list(idle), shapes)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")  # 6 bytes: sent as a float64


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Result of a step.

    Attributes:
        loss: the loss of the step over all data ranks, 0-d float32, detached.
        losses: losses of this rank's micro-batches in order, as the loss function gave them, without dummies.
        outputs: the model's outputs for them, if requested.
    """

    loss: torch.Tensor
    losses: torch.Tensor
    outputs: tuple[Any, ...] = field(default=(), repr=False)
