"""Checks of what a pipeline takes for granted: equal weights on its ranks, and a loss of outputs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from atorch_ns.errors import StepError
from atorch_ns.job import Job, is_on_meta
from atorch_ns.torch_compat import plain_name, tree_leaves

__all__ = ["OutputsAlone", "make_weights_equal"]


@torch.no_grad()
def make_weights_equal(job: Job, method: str) -> None:
    """Gives all ranks of a pipeline the weights of its first if theirs differ; collective over the pipeline."""
    group = job.stage_group
    if group is None or is_on_meta(job.module):
        return
    tensors = [*job.module.parameters(), *job.module.buffers()]
    sums = [_sum(tensor).to(job.device) for tensor in tensors]
    if not sums:
        return
    own = torch.stack(sums)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    differ = torch.stack([(one != gathered[0]) for one in gathered]).any(0)
    if not differ.any():
        return
    for tensor in tensors:
        value = tensor.data.to(job.device).contiguous()
        dist.broadcast(value, group=group, group_src=0)
        if value is not tensor.data:
            tensor.data.copy_(value)
    job.explain(
        method,
        f"{int(differ.sum())} of {len(tensors)} parameters and buffers differed between the ranks of a pipeline, which "
        "were seeded differently; all take those of its first rank",
    )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    return value.sum(dtype=torch.float64).nan_to_num()


class OutputsAlone(TorchFunctionMode):
    """Watches a loss function and refuses the model's parameters in it: a rank has those of its stages alone.

    Args:
        names: names of the parameters by their ids.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(made, torch.Tensor) and made.requires_grad for made in tree_leaves(result)):
            for given in tree_leaves((args, dict(kwargs))):
                if isinstance(given, nn.Parameter) and id(given) in self._names:
                    raise StepError(
                        f"loss_func computes with {self._names[id(given)]}, a parameter of the model. In a pipeline it "
                        "runs on the last stage, which has no parameters of the others, so the loss would lack them. "
                        "Use the optimizer's weight_decay for a penalty on weights, return from the model what the "
                        "loss needs, or train without pipeline."
                    )
        return result

    @classmethod
    def once(cls, model: nn.Module, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """``loss``, watched at its first call that computes gradients."""
        waiting = [True]

        def watched(batch: Any, output: Any) -> Any:
            if not (waiting and torch.is_grad_enabled()):
                return loss(batch, output)
            waiting.clear()
            with cls({id(parameter): plain_name(name) for name, parameter in model.named_parameters()}):
                return loss(batch, output)

        return watched
