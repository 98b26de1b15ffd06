"""Real steps, for models that do not run on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atorch_ns.profile._batches import map_batch
from atorch_ns.profile._precisions import Precision
from atorch_ns.profile._steps import Step, Subject, record_step
from atorch_ns.profile._structure import copy_structure

__all__ = ["real_copy", "record_real"]


def record_real(subject: Subject, precision: Precision, num_samples: int) -> Step:
    """One step of a deep copy of the model, with its values, on its device.

    Args:
        subject: what is traced.
        precision: how the step runs.
        num_samples: rows of the batch; more than it has repeat them.
    """
    model, batch = real_copy(subject, precision, num_samples)
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    return record_step(subject, model, batch, precision, tuple(subject.blocks), device_type=device_type)


def real_copy(subject: Subject, precision: Precision, num_samples: int) -> tuple[nn.Module, Any]:
    """A deep copy of the model and of so many rows of the batch, both on the model's device."""
    device = next((p.device for p in subject.model.parameters()), torch.device("cpu"))
    whole = subject.sizes[0]

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(precision.dtype_of(kind, tensor), copy=True)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to(device, copy=True)
        if not moved.dim() or moved.shape[0] != whole:
            return moved
        repeated = moved if num_samples <= whole else torch.cat([moved] * -(-num_samples // whole))
        return repeated[:num_samples].clone()

    return copy_structure(subject.model, make, {}), map_batch(rows, subject.batch)
