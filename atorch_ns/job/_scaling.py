"""Dynamic loss scaling that works in the plain training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.torch_compat import found_inf_tensors, local_grad_scaler

__all__ = ["LossScaler"]


class LossScaler:
    """A ``GradScaler`` whose scale enters in the backward pass, so that the loss itself stays readable.

    The loss that :meth:`scaled` returns has the user's value; its backward pass multiplies the gradient by
    the scale. ``loss.backward()`` therefore works as written, and so does dividing the loss beforehand.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        init_scale: the first scale.
        growth_interval: steps without overflow after which the scale doubles.
        group: the ranks that must skip a step together; ``None`` for one rank.
    """

    def __init__(
        self,
        device_type: str,
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.scaler = local_grad_scaler(device_type, init_scale=init_scale, growth_interval=growth_interval)
        self.num_backwards = 0
        self._group = group

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` with the scale in its backward pass."""
        result: torch.Tensor = _ScaleInBackward.apply(loss, self._scale_gradient)  # type: ignore[no-untyped-call]
        return result

    def scaled_elsewhere(self, device: torch.device) -> None:
        """Another rank computes the loss of this rank's gradients, and scales it alike."""
        self.scaler.scale(torch.zeros((), device=device))  # which makes the scale
        self.num_backwards += 1

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divides the gradients of ``optimizer`` by the scale; collective, also for a rank that has none.

        Returns:
            Whether any gradient on any rank is infinite or NaN.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        flags: list[torch.Tensor] = []
        if any(parameter.grad is not None for parameter in parameters):
            self.scaler.unscale_(optimizer)
            flags = found_inf_tensors(self.scaler, optimizer)
        if self._group is None:
            return any(float(flag) > 0 for flag in flags)
        device = parameters[0].device if parameters else torch.device("cpu")
        overflow = torch.zeros((), device=device)
        for flag in flags:
            overflow = torch.maximum(overflow, flag.reshape(()).to(device))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._group)
        for flag in flags:
            flag.fill_(overflow.item())
        return bool(overflow)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps ``optimizer`` unless :meth:`unscale` found an overflow, and adapts the scale."""
        self.scaler.step(optimizer)
        self.scaler.update()
        self.num_backwards = 0

    def _scale_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        self.num_backwards += 1
        return self.scaler.scale(gradient)


class _ScaleInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.scale(gradients[0]), None
