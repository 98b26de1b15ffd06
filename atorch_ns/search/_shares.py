"""Whether the ranks and micro-batches of a strategy can share out the samples of a step."""

from __future__ import annotations

from atorch_ns.estimate import Workload
from atorch_ns.strategy import Plan

__all__ = ["indivisible", "refusal"]


def indivisible(plan: Plan, workload: Workload) -> str | None:
    """Why the samples of a step cannot be shared out evenly by this plan; ``None`` if they can."""
    ranks, passes = plan.num_data_ranks, plan.num_micro_batches
    if workload.global_batch % (ranks * passes) == 0:
        return None
    return refusal(workload.global_batch, ranks, passes)


def refusal(batch: int, num_ranks: int, num_micro_batches: int) -> str:
    """The message for a batch that cannot be shared out: the sizes, and the nearest batches that can be."""
    divisor = num_ranks * num_micro_batches
    below = batch // divisor * divisor
    above = below + divisor
    near = f"sizes that divide are {below} and {above}" if below else f"size that divides is {above}"
    passes = f" in {num_micro_batches} micro-batches each" if num_micro_batches > 1 else ""
    return (
        f"a step has a global batch of {batch} samples, which {num_ranks} data-parallel "
        f"rank{'s' if num_ranks > 1 else ''} cannot share "
        f"evenly{passes}. The nearest {near}. Change the batch size or the number of "
        f"{'micro-batches' if passes else 'ranks'}."
    )
