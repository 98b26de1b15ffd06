"""Steps on fake tensors: shapes, dtypes and storages without memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from atorch_ns.profile._batches import map_batch, resized_shape
from atorch_ns.profile._precisions import Precision
from atorch_ns.profile._real_values import RealValues, may_be_real
from atorch_ns.profile._steps import Step, Subject, record_step
from atorch_ns.profile._structure import copy_structure
from atorch_ns.profile._truncate import Container
from atorch_ns.torch_compat import fake_tensor_mode, outside_fake_mode, quiet_fake_kernels

__all__ = ["FakeSteps", "copied_paths"]


class FakeSteps:
    """Records steps of one model on fake tensors; what one step learns of operators' shapes the next reuses.

    Args:
        subject: what is traced.
        containers: those that are shortened, by path.
        device: that the fake tensors claim to be on.
    """

    def __init__(self, subject: Subject, containers: Mapping[str, Container], device: str) -> None:
        self._subject = subject
        self._containers = containers
        self._device = torch.device(device)
        self._mode = fake_tensor_mode()
        self._batches: dict[tuple[int, int], Any] = {}

    def record(self, precision: Precision, sizes: tuple[int, int]) -> Step:
        """One step with batches of the given B and T."""
        paths = copied_paths(self._subject, self._containers)
        with self.prepared(precision, sizes) as (model, batch):
            return record_step(self._subject, model, batch, precision, paths, device_type=self._device.type)

    @contextmanager
    def prepared(self, precision: Precision, sizes: tuple[int, int]) -> Iterator[tuple[nn.Module, Any]]:
        """The copy of the model and a batch of the given B and T, inside the modes that they run in."""
        with self._mode, quiet_fake_kernels():
            model = copy_structure(self._subject.model, partial(self._tensor, precision), self._containers)
            if sizes not in self._batches:
                self._batches[sizes] = map_batch(partial(self._resized, sizes), self._subject.batch)
            with RealValues():
                yield model, self._batches[sizes]

    def _tensor(self, precision: Precision, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the copy of the model."""
        if kind != "parameter" and may_be_real(tensor, tensor.numel(), self._device):
            with outside_fake_mode():
                return tensor.detach().to(self._device, copy=True)
        dtype = precision.dtype_of(kind, tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self._device)

    def _resized(self, sizes: tuple[int, int], tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the batch of B and T."""
        shape = resized_shape(tuple(tensor.shape), self._subject.sizes, sizes)
        if not may_be_real(tensor, math.prod(shape), self._device):
            return torch.empty(shape, dtype=tensor.dtype, device=self._device)
        with outside_fake_mode():
            return _with_values(tensor.detach().to(self._device), shape)


def _with_values(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` with each dim cut or repeated to the sizes of ``shape``; memory of its own."""
    for dim, size in enumerate(shape):
        if size != tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor.clone(memory_format=torch.contiguous_format)


def copied_paths(subject: Subject, containers: Mapping[str, Container]) -> tuple[str, ...]:
    """The paths of the blocks in the shortened copy."""
    paths: dict[str, None] = {}
    for path in subject.blocks:
        container = containers.get(path.rpartition(".")[0])
        if container is None:
            paths[path] = None
        else:
            paths.update((container.copy_path(place), None) for place in range(len(container.kept)))
    return tuple(paths)
