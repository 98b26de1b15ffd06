"""What optimizers of torch and of other packages cannot update, found before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from atorch_ns.errors import InputError

__all__ = ["NOT_OF_DTENSORS", "keeps_blocks", "refuse_what_fails"]

NOT_OF_DTENSORS: Final = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers of torch with operators in place that DTensors refuse in the first step (torch 2.11 to 2.13)."""


def refuse_what_fails(optimizer: torch.optim.Optimizer) -> None:
    """Checks the parameters of a new optimizer against what its package is known not to update.

    Raises:
        InputError: naming the package, the reason and what works instead.
    """
    package = type(optimizer).__module__.partition(".")[0]
    name = f"{package}.optim.{type(optimizer).__name__}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    reason = None
    if package == "bitsandbytes":
        reason = _of_bitsandbytes(parameters)
    elif package == "torchao":
        reason = _of_torchao(parameters)
    elif isinstance(optimizer, NOT_OF_DTENSORS):
        base = next(kind for kind in NOT_OF_DTENSORS if isinstance(optimizer, kind))
        name = (
            f"torch.optim.{base.__name__}"
            if type(optimizer) is base
            else f"{type(optimizer).__name__}, of torch.optim.{base.__name__},"
        )
        reason = _of_torch(optimizer, parameters)
    if reason is not None:
        raise InputError(f"{name} {reason}")


def keeps_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of bitsandbytes with 8-bit states: some of them have one value for a block of elements.

    Parameters that are too small for 8 bits have states of one value an element all the same.
    """
    ours = type(optimizer).__module__.partition(".")[0] == "bitsandbytes"
    return ours and getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8


def _of_torch(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> str | None:
    """Their operators in place would have to change how a DTensor is divided."""
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return None
    instead = "zero1 or ('zero2', {'not_use_fsdp': True})"
    if isinstance(optimizer, torch.optim.Rprop):  # element by element, so flat pieces do
        instead += " or ('fsdp', {'version': 1})"
    return (
        "cannot update DTensors, which this strategy makes of the parameters: torch has no rule for one of its "
        f"operators in place. Shard with {instead}, use ddp, or use another optimizer, such as AdamW."
    )


def _of_bitsandbytes(parameters: Iterable[torch.Tensor]) -> str | None:
    """Its kernels take plain tensors."""
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return None
    return (
        "cannot update DTensors, which this strategy makes of the parameters. Use torchao.optim.AdamW8bit, or shard "
        "with zero1, ('zero2', {'not_use_fsdp': True}) or ('fsdp', {'version': 1}), whose optimizers see plain tensors."
    )


def _of_torchao(parameters: Iterable[torch.Tensor]) -> str | None:
    """DTensors keep the dtype that its quantized states seem to have, so mixed dtypes fail in the first step."""
    if not any(isinstance(p, DTensor) and p.dtype != torch.float32 for p in parameters):
        return None
    return (
        "cannot update DTensors in 16 bits. Use ('amp_native', 'bf16') in place of half, or ('half', 'fp16'), whose "
        "fp32 masters it updates."
    )
