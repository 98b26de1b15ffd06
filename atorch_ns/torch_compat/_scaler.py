"""Loss scales of fp16 where gradients are divided over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

__all__ = ["found_inf_tensors", "local_grad_scaler"]


def found_inf_tensors(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags, one per device, that ``scaler.unscale_(optimizer)`` has just set; 0-d or 1-element float."""
    state = scaler._per_optimizer_states[id(optimizer)]
    return list(state["found_inf_per_device"].values())


def local_grad_scaler(device_type: str, **options: Any) -> torch.amp.GradScaler:
    """A ``GradScaler`` that looks at this rank's part of every gradient (``_unscale_grads_``).

    torch's own asks DTensors on one mesh together, and refuses gradients of several meshes and plain ones beside
    them. Its flags are then of this rank alone: combine them over all ranks. It skips steps itself, also those of
    optimizers that can do so in their kernels (``_step_supports_amp_scaling``).
    """
    import torch

    class LocalGradScaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
            found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
                cast(Any, _LocalGroups(optimizer)), *args
            )
            return found

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # A fused optimizer would take the flags, plain tensors, into one call with DTensors.
            optimizer._step_supports_amp_scaling = False
            return super().step(optimizer, *args, **kwargs)

    return LocalGradScaler(device_type, **options)


class _LocalGroups:
    """An optimizer's ``param_groups`` with this rank's parts in place of DTensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [
            {"params": [_local_with_grad(parameter) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]


def _local_with_grad(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor) or parameter.grad is None:
        return parameter
    local = parameter.to_local().detach()
    grad: Any = parameter.grad
    local.grad = grad.to_local()
    return local
