"""The arguments and results of blocks that run on a part of the sequence.

Inside, gradients are as many times those of the whole as there are ranks. A weight's gradient is then the mean
over the ranks, which leaves alone what each rank has whole: uses of the same weight outside of the blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.sharding._collectives import copy_to, scale_gradient
from atorch_ns.sharding._nested import Path, map_leaves
from atorch_ns.sharding._sequence_layout import SequenceLayout
from atorch_ns.sharding._sequence_plan import BlockPlan

__all__ = ["divide_arguments", "gather_results"]


def divide_arguments(
    arguments: Any, plan: BlockPlan, layout: SequenceLayout, group: dist.ProcessGroup
) -> Any:
    """``(args, kwargs)`` with this rank's positions of what is whole and divided by the plan.

    What stays whole and is trained gets the sum of the gradients of all ranks.
    """

    def divide(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = plan.divided.get(path)
        if dim is not None:
            is_whole = leaf.dim() > dim and leaf.size(dim) == layout.length
            return scale_gradient(layout.divide(leaf, dim, group), 1 / layout.ranks) if is_whole else leaf
        return scale_gradient(copy_to(leaf, group), 1 / layout.ranks) if leaf.requires_grad else leaf

    return map_leaves(arguments, divide)


def gather_results(output: Any, plan: BlockPlan, layout: SequenceLayout, group: dist.ProcessGroup) -> Any:
    """The results of a block with those whole that are parts."""

    def gather(path: Path, leaf: Any) -> Any:
        dim = plan.outputs.get(path)
        if dim is None or leaf is None:
            return leaf
        return layout.gather(scale_gradient(leaf, float(layout.ranks)), dim, group)

    return map_leaves(output, gather)
