"""What a sharded model's own floating inputs become where its precision follows autocast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.job import Job
from atorch_ns.torch_compat import tree_map_only
from opt_lib._shard_config import ShardConfig

__all__ = ["cast_where_refused", "leaves_inputs"]

_REFUSE: Final = (nn.EmbeddingBag, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Modules that refuse fp32 inputs (of the first: the weights of samples) beside reduced weights, and that autocast
leaves alone."""
_REFUSE_ON_CPU: Final = (nn.LayerNorm, nn.GroupNorm, nn.Bilinear)
"""On GPUs autocast computes these in fp32; on CPUs it leaves them alone."""


def leaves_inputs(job: Job, config: ShardConfig) -> bool:
    """Whether the model's inputs stay as they are given, as autocast alone leaves them.

    Times, positions and weights of samples lose in 16 bits what the model computes from them; operators that are
    better off in 16 bits are cast by autocast. Dtypes of the user's own, in ``mixed_precision``, decide for themselves.
    """
    return config.mixed_precision == "auto" and job.plan.compute_dtype is not None


def cast_where_refused(job: Job, units: Iterable[nn.Module]) -> None:
    """Lets modules outside of ``units`` take fp32 inputs beside their reduced weights.

    The inputs of a unit are cast at its edge.

    Args:
        job: the job; hooks are added to modules of its roots.
        units: modules that are gathered as one unit each.
    """
    kinds = (*_REFUSE, *(_REFUSE_ON_CPU if job.device.type == "cpu" else ()))
    inside = {id(module) for unit in units for module in unit.modules()}
    for root in job.roots:
        for module in root.modules():
            if isinstance(module, kinds) and id(module) not in inside:
                module.register_forward_pre_hook(_cast_to_weight, with_kwargs=True)


def _cast_to_weight(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    dtype, size = weight.dtype, weight.itemsize

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > size else tensor

    return tree_map_only(torch.Tensor, cast, args), tree_map_only(torch.Tensor, cast, kwargs)
