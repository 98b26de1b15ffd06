"""Actions of a pipeline schedule: the passes of each rank in order, and the activations that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

PassKind = Literal["F", "B", "I", "W", "R"]
"""Forward, whole backward, backward for the input or for the weights, recomputation of a forward pass."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; stages are numbered in the order of the model."""

    kind: PassKind
    stage: int
    micro_batch: int


Orders = tuple[tuple[Action, ...], ...]
"""The actions of every rank."""


def forward_only(rank_of: Sequence[int], num_micro_batches: int) -> Orders:
    """Forward passes alone: each stage of a rank runs all micro-batches before the next."""
    return tuple(
        tuple(
            Action("F", stage, index)
            for stage, holder in enumerate(rank_of)
            if holder == rank
            for index in range(num_micro_batches)
        )
        for rank in range(1 + max(rank_of))
    )


def live_micro_batches(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Peak number of micro-batches whose activations a stage holds, by stage."""
    counts: dict[int, int] = {}  # held now, by stage
    most: dict[int, int] = {}
    for order in orders:
        for kind, stage, _ in order:
            if kind == "F":
                counts[stage] = counts.get(stage, 0) + 1
                most[stage] = max(most.get(stage, 0), counts[stage])
            elif kind in "BW":
                counts[stage] -= 1  # of a split backward pass W is the last to need them
    return tuple(most[stage] for stage in range(len(most)))


def live_bytes(
    orders: Sequence[Sequence[Action]],
    activation_bytes: Sequence[float],
    recomputed_bytes: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Peak bytes of activations on each rank.

    Args:
        activation_bytes: bytes that a stage keeps of one micro-batch between forward and backward, by stage.
            All count until the weights' part of a split backward, and after a recomputation of its own.
        recomputed_bytes: bytes after such a pass, by stage; ``None`` for the same.
    """
    again = activation_bytes if recomputed_bytes is None else recomputed_bytes
    peaks = []
    for order in orders:
        total = most = 0.0  # bytes of all stages of the rank
        early = {action[1:] for action in order if action.kind == "R"}  # (stage, micro-batch)
        for kind, stage, index in order:
            sizes = again if (stage, index) in early else activation_bytes
            if kind == "R" or (kind == "F" and (stage, index) not in early):
                total += sizes[stage]
                most = max(most, total)
            elif kind in "BW":
                total -= sizes[stage]
        peaks.append(most)
    return tuple(peaks)


def check_orders(orders: Sequence[Sequence[Action]], num_micro_batches: int, rank_of: Sequence[int]) -> str:
    """The first missing, repeated or misplaced pass in orders, as a clause; empty if there is none.

    Deadlocks between ranks are found by :func:`~atorch_ns.pipeline.simulate`.
    """
    # The kinds of the passes so far, such as "FI": always the beginning of one of _WHOLE.
    passes = {(stage, index): "" for stage in range(len(rank_of)) for index in range(num_micro_batches)}
    for rank, order in enumerate(orders):
        for kind, stage, index in order:
            if (stage, index) not in passes:
                return f"there is no stage {stage} or no micro-batch {index}"
            if rank_of[stage] != rank:
                return f"rank {rank} does {kind} with stage {stage}, which is on rank {rank_of[stage]}"
            passes[stage, index] += kind
            if not any(whole.startswith(passes[stage, index]) for whole in _WHOLE):
                return f"stage {stage} does {', '.join(passes[stage, index])} with micro-batch {index}"
    open_key = next((key for key, kinds in passes.items() if kinds not in _WHOLE), None)
    if open_key is None:
        return ""
    kinds = ", ".join(passes[open_key]) or "nothing"
    return f"stage {open_key[0]} does only {kinds} with micro-batch {open_key[1]}"


_WHOLE: Final = ("FB", "FIW", "FRB", "FRIW")
"""The passes of a stage for a micro-batch, in each possible form."""

MOST_PASSES: Final = max(map(len, _WHOLE))
"""The maximum number of passes of a stage for a micro-batch."""
