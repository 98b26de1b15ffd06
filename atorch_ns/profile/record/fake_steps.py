"""Steps of a copy of the model: on fake tensors, or a real one for models that do not run on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.nests import map_tensors, resize, resized_shape
from atorch_ns.capture.real_values import RealValues, fake_like, largest_real, may_be_real
from atorch_ns.capture.structure import Container, copy_structure
from atorch_ns.profile.record.steps import RecordedStep, StepPrecision, TracedModel, record_step
from atorch_ns.torch_compat import KernelsOfGpus, fake_tensor_mode, outside_fake_mode, quiet_fake_kernels


class FakeSteps:
    """Records steps of one model on fake tensors. Later steps reuse the shapes of earlier operators.

    Args:
        containers: shortened containers, by path.
        device: device that the fake tensors claim to be on.
    """

    def __init__(self, subject: TracedModel, containers: Mapping[str, Container], device: str) -> None:
        self._subject = subject
        self._containers = containers
        self._device = torch.device(device)
        self._mode = fake_tensor_mode()
        self._batches: dict[tuple[int, int], Any] = {}

    def record(self, precision: StepPrecision, sizes: tuple[int, int]) -> RecordedStep:
        """One step with batches of the given B and T."""
        paths = copied_paths(self._subject, self._containers)
        with self.prepared(precision, sizes) as (model, batch):
            return record_step(
                self._subject, model, batch, precision, block_paths=paths, device_type=self._device.type
            )

    @contextmanager
    def prepared(self, precision: StepPrecision, sizes: tuple[int, int]) -> Iterator[tuple[nn.Module, Any]]:
        """Yields the copy of the model and a batch of the given B and T, inside their modes."""
        with self._mode, quiet_fake_kernels():
            model = copy_structure(self._subject.model, partial(self._fake_copy, precision), self._containers)
            if sizes not in self._batches:
                self._batches[sizes] = map_tensors(partial(self._resize_tensor, sizes), self._subject.batch)
            is_for_cpu = self._subject.counts_workspaces and self._device.type == "cpu"
            kernels = nullcontext() if is_for_cpu else KernelsOfGpus()
            with RealValues(largest_real(math.prod(sizes))), kernels:
                yield model, self._batches[sizes]

    def _fake_copy(self, precision: StepPrecision, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = precision.dtype_of(kind, tensor)
        return fake_like(tensor, self._device, dtype=dtype, is_parameter=kind == "parameter")

    def _resize_tensor(self, sizes: tuple[int, int], tensor: torch.Tensor) -> torch.Tensor:
        shape = resized_shape(tuple(tensor.shape), self._subject.sizes, sizes)
        largest = largest_real(math.prod(sizes))
        if not may_be_real(tensor, math.prod(shape), self._device, largest=largest):  # floats and large ones
            return torch.empty(shape, dtype=tensor.dtype, device=self._device)
        with outside_fake_mode():  # masks and positions keep their values
            return resize(tensor.detach().to(self._device), shape)


def copied_paths(subject: TracedModel, containers: Mapping[str, Container]) -> tuple[str, ...]:
    """The paths of the blocks in the shortened copy."""
    paths: dict[str, None] = {}
    for path in subject.blocks:
        container = containers.get(path.rpartition(".")[0])  # the list that holds the block
        if container is None:
            paths[path] = None
        else:
            paths.update((container.copy_path(index), None) for index in range(len(container.kept)))
    return tuple(paths)


def record_real(subject: TracedModel, precision: StepPrecision, num_samples: int) -> RecordedStep:
    """One step of a deep copy of the model, with its values, on its device.

    Args:
        num_samples: rows of the batch, repeated if it has fewer.
    """
    model, batch = real_copy(subject, precision, num_samples)
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    return record_step(
        subject, model, batch, precision, block_paths=tuple(subject.blocks), device_type=device_type
    )


def real_copy(subject: TracedModel, precision: StepPrecision, num_samples: int) -> tuple[nn.Module, Any]:
    """A deep copy of the model and of ``num_samples`` rows of the batch, on the model's device."""
    device = next((p.device for p in subject.model.parameters()), torch.device("cpu"))

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(precision.dtype_of(kind, tensor), copy=True)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        shape = resized_shape(tuple(tensor.shape), subject.sizes, (num_samples, subject.sizes[1]))
        return resize(tensor.detach().to(device), shape)

    return copy_structure(subject.model, make, {}), map_tensors(rows, subject.batch)
