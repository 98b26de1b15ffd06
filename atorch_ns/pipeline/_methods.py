"""Cuts that do not look at time: even numbers of blocks, even parameters, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

from atorch_ns.errors import InputError
from atorch_ns.pipeline._partition import partition

__all__ = ["custom_cuts", "parameter_cuts", "uniform_cuts", "uniform_floor_cuts"]


def uniform_cuts(
    num_blocks: int, num_stages: int, *, allowed_cuts: Collection[int] | None = None
) -> tuple[int, ...]:
    """Equal numbers of blocks; the first stages have one more where they do not divide.

    Where a place may not be cut, the most even cut of those that may be.

    Raises:
        InputError: if there are fewer blocks or allowed cuts than needed.

    Example:
        >>> uniform_cuts(10, 4)
        (3, 6, 8)
    """
    return _even(num_blocks, num_stages, allowed_cuts, lambda stage, rest: stage < rest)


def uniform_floor_cuts(
    num_blocks: int, num_stages: int, *, allowed_cuts: Collection[int] | None = None
) -> tuple[int, ...]:
    """Equal numbers of blocks; the stages after the first have one more where they do not divide.

    The first stage often has the embedding, and in 1F1B it holds the most micro-batches.

    Raises:
        InputError: as :func:`uniform_cuts`.

    Example:
        >>> uniform_floor_cuts(10, 4)
        (2, 5, 8)
    """
    return _even(num_blocks, num_stages, allowed_cuts, lambda stage, rest: 1 <= stage <= rest)


def parameter_cuts(
    parameters: Sequence[float], num_stages: int, *, allowed_cuts: Collection[int] | None = None
) -> tuple[int, ...]:
    """The stage with the most parameters has as few as possible.

    Args:
        parameters: elements (or bytes), by block.
        num_stages: stages.
        allowed_cuts: positions that may be cut; ``None`` for all.

    Raises:
        InputError: as :func:`uniform_cuts`.
    """
    return partition(parameters, num_stages, allowed_cuts=allowed_cuts)


def custom_cuts(
    positions: Sequence[int], num_blocks: int, num_stages: int, *, refused: Mapping[int, str] | None = None
) -> tuple[int, ...]:
    """The user's cuts, checked.

    Args:
        positions: the first block of every stage and the number of blocks, ``[0, 6, 12, 18, 26]``, as Merak's
            ``custom_partition``; or only the cuts between, ``[6, 12, 18]``.
        num_blocks: blocks of the model.
        num_stages: stages.
        refused: positions that cannot be cut, each with the reason.

    Raises:
        InputError: with everything that is wrong with them.
    """
    given = list(positions)
    whole = len(given) == num_stages + 1
    if whole and (given[0], given[-1]) != (0, num_blocks):
        raise InputError(
            f"a partition of {num_blocks} blocks begins with 0 and ends with {num_blocks}, but this one is "
            f"{given}. Say where each stage begins, then {num_blocks}."
        )
    if not whole and len(given) != num_stages - 1:
        raise InputError(
            f"{num_stages} stages have {num_stages - 1} cuts, or {num_stages + 1} numbers with 0 and "
            f"{num_blocks}, but the partition {given} has {len(given)}."
        )
    cuts = tuple(given[1:-1] if whole else given)
    problems = _order_problems(cuts, num_blocks)
    for cut in cuts:
        if refused and cut in refused:
            problems.append(f"the model cannot be cut before block {cut}: {refused[cut].rstrip('.')}.")
    if problems:
        open_places = [cut for cut in range(1, num_blocks) if not refused or cut not in refused]
        raise InputError(f"{' '.join(problems)} It can be cut before blocks {_runs(open_places)}.")
    return cuts


def _even(
    num_blocks: int,
    num_stages: int,
    allowed_cuts: Collection[int] | None,
    has_one_more: Callable[[int, int], bool],
) -> tuple[int, ...]:
    most_even = partition([1.0] * num_blocks, num_stages, allowed_cuts=allowed_cuts)  # checks the numbers too
    least, rest = divmod(num_blocks, num_stages)
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


def _runs(numbers: Sequence[int]) -> str:
    """Rising numbers as text, neighbours as one range."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in parts]
    return ", ".join(texts) or "(none)"
