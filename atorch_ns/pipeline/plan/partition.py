"""Partition of a pipeline's blocks into contiguous stages whose slowest is as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from atorch_ns.errors import InputError
from atorch_ns.text import bytes_text


def uniform_cuts(
    num_blocks: int, num_stages: int, *, allowed_cuts: Collection[int] | None = None
) -> tuple[int, ...]:
    """Cuts into equal numbers of blocks. If they do not divide evenly, the first stages have one more.

    If such a cut is not allowed, the most even allowed cut is taken.

    Raises:
        InputError: if there are fewer blocks or allowed cuts than needed.

    Example:
        >>> uniform_cuts(10, 4)
        (3, 6, 8)
    """
    return _even_cuts(num_blocks, num_stages, allowed_cuts, lambda stage, rest: stage < rest)


def uniform_floor_cuts(
    num_blocks: int, num_stages: int, *, allowed_cuts: Collection[int] | None = None
) -> tuple[int, ...]:
    """Cuts into equal numbers of blocks. If they do not divide evenly, stages after the first have one more.

    The first stage often has the embedding, and in 1F1B it holds the most micro-batches.

    Raises:
        InputError: as :func:`uniform_cuts`.

    Example:
        >>> uniform_floor_cuts(10, 4)
        (2, 5, 8)
    """
    return _even_cuts(num_blocks, num_stages, allowed_cuts, lambda stage, rest: 1 <= stage <= rest)


def custom_cuts(
    positions: Sequence[int], num_blocks: int, num_stages: int, *, refused: Mapping[int, str] | None = None
) -> tuple[int, ...]:
    """The user's cuts, checked.

    Args:
        positions: the first block of every stage and the number of blocks, ``[0, 6, 12, 18, 26]``, as Merak's
            ``custom_partition``; or only the cuts between, ``[6, 12, 18]``.
        refused: positions that cannot be cut, each with the reason.

    Raises:
        InputError: with everything that is wrong with them.
    """
    numbers = list(positions)
    whole = len(numbers) == num_stages + 1  # with 0 and the number of blocks, as in Merak
    if whole and (numbers[0], numbers[-1]) != (0, num_blocks):
        raise InputError(
            f"a partition of {num_blocks} blocks must start with 0 and end with {num_blocks}, but this one is "
            f"{numbers}. Give the first block of each stage, then {num_blocks}."
        )
    if not whole and len(numbers) != num_stages - 1:
        raise InputError(
            f"{num_stages} stages need {num_stages - 1} cuts, or {num_stages + 1} numbers with 0 and "
            f"{num_blocks}, but the partition {numbers} has {len(numbers)}."
        )
    cuts = tuple(numbers[1:-1] if whole else numbers)
    problems = _order_problems(cuts, num_blocks)
    for cut in cuts:
        if refused and cut in refused:
            problems.append(f"the model cannot be cut before block {cut}: {refused[cut].rstrip('.')}.")
    if problems:
        open_places = [cut for cut in range(1, num_blocks) if not refused or cut not in refused]
        raise InputError(f"{' '.join(problems)} It can be cut before blocks {_ranges_text(open_places)}.")
    return cuts


def _even_cuts(
    num_blocks: int,
    num_stages: int,
    allowed_cuts: Collection[int] | None,
    has_one_more: Callable[[int, int], bool],
) -> tuple[int, ...]:
    most_even = partition([1.0] * num_blocks, num_stages, allowed_cuts=allowed_cuts)  # checks the numbers too
    least, rest = divmod(num_blocks, num_stages)  # ``rest`` stages have one block more
    cuts, end = [], 0
    for stage in range(num_stages - 1):
        end += least + has_one_more(stage, rest)
        cuts.append(end)
    return tuple(cuts) if allowed_cuts is None or set(cuts) <= set(allowed_cuts) else most_even


def _order_problems(cuts: Sequence[int], num_blocks: int) -> list[str]:
    problems = [
        f"cut {cut} is outside of the model, whose {num_blocks} blocks can be cut at 1 to {num_blocks - 1}."
        for cut in cuts
        if not 0 < cut < num_blocks
    ]
    for before, after in pairwise(cuts):
        if after <= before:
            problems.append(f"cut {after} follows {before}: the stage between would be empty.")
    return problems


def _ranges_text(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []  # runs of neighbours, each printed as one range
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in parts]
    return ", ".join(texts) or "(none)"


_Matrix = NDArray[np.float64]


ByBlock = Sequence[float] | Sequence[Sequence[float]]
"""Numbers by block, or by stage and block."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of blocks on the rank that holds them, in bytes.

    Attributes:
        states: parameters, gradients and optimizer state, by block.
        activations: bytes of one micro-batch until its backward pass, by block, or by stage and block.
        live: peak number of micro-batches whose activations a stage holds, by stage.
        edges: bytes that the cut at ``c`` adds to both stages, at index ``c - 1``; empty for none.
    """

    states: Sequence[float]
    activations: ByBlock
    live: Sequence[int]
    edges: Sequence[float] = ()


def partition(
    costs: ByBlock,
    num_stages: int,
    *,
    memory: StageMemory | None = None,
    limit: float | Sequence[float] | None = None,
    allowed_cuts: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Cuts blocks into stages so that the slowest stage is as fast as possible.

    Exact, by dynamic programming over (stage, first block). Among the cuts with the fastest slowest stage it
    takes the one whose stages are the most even (least sum of squares).

    Args:
        costs: seconds, or another unit, of one micro-batch, both passes, by block, or by stage and block.
        num_stages: the number of stages, each of at least one block.
        memory: the bytes of the blocks; needed with ``limit``.
        limit: the bytes that a stage may take, one number for all or one for each.
        allowed_cuts: positions that may be cut; ``None`` for all. Position ``c`` is before block ``c``.

    Returns:
        The ``num_stages - 1`` positions of the cuts, ascending: stage 0 has the blocks before the first.

    Raises:
        InputError: if there are fewer blocks or allowed cuts than needed, or no cut fits the limit.

    Example:
        >>> partition([1, 1, 1, 1, 4], 2), partition([3, 1, 1, 1], 2)
        ((4,), (1,))
    """
    num = np.shape(costs)[-1]
    starts = _allowed_starts(num, num_stages, allowed_cuts)
    times = np.where(starts[:, None], _span_sums(costs, "costs"), np.inf)  # [i, j] or [stage, i, j]
    fits = None  # [stage, i, j] where there is a limit
    if limit is not None:
        if memory is None:
            raise InputError("a limit needs the bytes of the blocks: give memory too.")
        fits = _span_bytes(memory, num, num_stages) <= _stage_limits(limit, num_stages)[:, None, None]
    # First pass: the least time of the slowest stage. A span that does not fit counts as infinitely slow.
    slowest = _least_maximum(times if fits is None else np.where(fits, times, np.inf), num_stages)
    if not math.isfinite(slowest):
        # Without a limit there is always a cut: _allowed_starts has refused all other cases.
        assert memory is not None
        assert limit is not None
        raise InputError(_does_not_fit(memory, starts, num_stages, limit))
    # Second pass: of the cuts that reach this time, the one with the least sum of squares.
    squares = np.where(times <= slowest, times * times, np.inf)
    return _least_sum(squares if fits is None else np.where(fits, squares, np.inf), num_stages)


def stage_ranges(cuts: Sequence[int], num_blocks: int) -> tuple[range, ...]:
    """The blocks of each stage.

    Example:
        >>> stage_ranges((2, 3), 5)
        (range(0, 2), range(2, 3), range(3, 5))
    """
    edges = (0, *cuts, num_blocks)
    return tuple(range(first, last) for first, last in pairwise(edges))


def _allowed_starts(num: int, num_stages: int, allowed_cuts: Collection[int] | None) -> NDArray[np.bool_]:
    if num_stages < 1:
        raise InputError(f"a pipeline cannot have {num_stages} stages. Use 1 or more.")
    if num_stages > num:
        raise InputError(
            f"{num_stages} stages need at least {num_stages} blocks, but the model has {num}. "
            f"Use at most {num} stages (pipeline degree × stages_per_rank)."
        )
    starts = np.ones(num + 1, dtype=np.bool_)  # [num + 1]: whether a stage may begin there
    if allowed_cuts is not None:
        inner = sorted({cut for cut in allowed_cuts if 0 < cut < num})
        if len(inner) < num_stages - 1:
            raise InputError(
                f"{num_stages} stages need {num_stages - 1} cuts, but the model of {num} blocks can be cut at only "
                f"{len(inner)} places{f' (before blocks {inner})' if inner else ''}. "
                f"Use at most {len(inner) + 1} stages."
            )
        starts[1:num] = False  # 0 and num are not cuts and stay allowed
        starts[inner] = True
    return starts


def _span_sums(values: ByBlock, name: str) -> _Matrix:
    """Sums over blocks ``i`` to ``j - 1`` at ``[i, j]``, or ``[stage, i, j]``; infinite for no block."""
    array = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InputError(f"{name} must be non-negative numbers, but are {list(values)}.")
    # Prefix sums: before[i] is the sum of the blocks before block i.
    before = np.concatenate([np.zeros((*array.shape[:-1], 1)), np.cumsum(array, axis=-1)], axis=-1)
    sums = before[..., None, :] - before[..., :, None]
    return np.where(np.triu(np.ones(sums.shape[-2:], dtype=np.bool_), 1), sums, np.inf)  # where j > i


def _at_ends(values: Sequence[float], num: int, name: str) -> _Matrix:
    """The values that cuts at both ends add to each span ``[i, j]``; the model's ends are not cuts."""
    if len(values) not in (0, num - 1):
        raise InputError(f"{num} blocks have {num - 1} places to cut, but there are {len(values)} {name}.")
    at = np.zeros(num + 1)
    if len(values) > 0:
        at[1:num] = values  # the value of the cut at position c has index c - 1
    return at[:, None] + at[None, :]


def _span_bytes(memory: StageMemory, num: int, num_stages: int) -> _Matrix:
    """Bytes of every span of blocks as every stage: ``[stage, i, j]``."""
    lengths = (len(memory.states), np.shape(memory.activations)[-1], len(memory.live))
    if lengths != (num, num, num_stages):
        raise InputError(
            f"the memory of {num} blocks in {num_stages} stages needs {num} states, {num} activations and "
            f"{num_stages} live counts, but there are {lengths[0]}, {lengths[1]} and {lengths[2]}."
        )
    states = _span_sums(memory.states, "states") + _at_ends(memory.edges, num, "edges")
    activations = _span_sums(memory.activations, "activations")
    live = np.asarray(memory.live, dtype=np.float64)[:, None, None]  # [stage, 1, 1]
    spans = np.isfinite(activations)  # 0 × infinity is not a number
    sums: _Matrix = states[None] + live * np.where(spans, activations, 0.0)
    return sums


def _stage_limits(limit: float | Sequence[float], num_stages: int) -> _Matrix:
    limits = np.asarray(limit, dtype=np.float64)
    if limits.ndim == 1 and len(limits) != num_stages:
        raise InputError(
            f"there are {len(limits)} limits for {num_stages} stages: give one, or one for each."
        )
    return np.broadcast_to(limits, (num_stages,)).copy()  # broadcast_to returns a read-only view


def _of_stage(spans: _Matrix, stage: int) -> _Matrix:
    return spans if spans.ndim == 2 else np.asarray(spans[stage])


def _least_maximum(spans: _Matrix, num_stages: int) -> float:
    """The least maximum over all cuts of ``[i, j]`` or ``[stage, i, j]``; infinite if there is no cut."""
    best = _of_stage(spans, 0)[0]  # best[j]: the least maximum of stages that end before block j
    for stage in range(1, num_stages):
        best = np.maximum(best[:, None], _of_stage(spans, stage)).min(axis=0)
    return float(best[-1])


def _least_sum(spans: _Matrix, num_stages: int) -> tuple[int, ...]:
    best, came = _of_stage(spans, 0)[0], []  # came[stage - 1][j]: where the stage that ends at j begins
    for stage in range(1, num_stages):
        sums = best[:, None] + _of_stage(spans, stage)
        came.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    cuts, end = [], len(best) - 1
    for origin in reversed(came):  # from the end of the model back to its start
        end = int(origin[end])
        cuts.append(end)
    return tuple(reversed(cuts))


def _does_not_fit(
    memory: StageMemory, starts: NDArray[np.bool_], num_stages: int, limit: float | Sequence[float]
) -> str:
    num = len(memory.states)
    spans = np.where(starts[None, :, None], _span_bytes(memory, num, num_stages), np.inf)
    limits = _stage_limits(limit, num_stages)
    over = _least_maximum(spans - limits[:, None, None], num_stages)  # the least excess of any cut
    same = limits.min() == limits.max()
    bound = bytes_text(limits[0]) if same else f"{bytes_text(limits.min())} to {bytes_text(limits.max())}"
    return (
        f"no cut of {num} blocks into {num_stages} stages fits {bound} a stage: in the best one a stage is "
        f"{bytes_text(over)} over. Use more stages, a schedule that holds fewer micro-batches (1F1B, not GPipe), "
        f"smaller micro-batches, recomputation, or a limit of {bytes_text(limits.max() + over)}."
    )
