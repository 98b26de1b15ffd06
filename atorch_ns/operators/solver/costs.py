"""Costs of operators and conversions: seconds from floating point operations, bytes and links, and the bytes that stay.

Each operator is run once on fake tensors, forward and backward, which tells its floating point operations and what autograd
saves; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from atorch_ns.cluster import Cluster
from atorch_ns.cluster.collectives import DEFAULT_BUCKET_BYTES, Groups, collective_seconds
from atorch_ns.cluster.hardware import Device, Hardware
from atorch_ns.operators.divided.conversions import Need, steps
from atorch_ns.operators.graph.graph import Operator
from atorch_ns.operators.rules.rule import Call, Placement, Rule, TensorSpec
from atorch_ns.torch_compat import fake_tensor_mode, quiet_fake_kernels

_BACKWARD = 2.0
"""Bytes that a backward pass moves, in units of the forward pass: it reads what was saved and the gradient, and writes one."""


@dataclass(frozen=True)
class Work:
    """What one call of an operator takes, whole.

    Attributes:
        forward_flops, backward_flops: floating point operations of matrix products.
        moved: bytes that the forward pass reads and writes; 0 for views.
        saved_inputs: for each tensor argument whether autograd keeps it until the backward pass.
        saved_bytes: what it keeps besides, such as a mask.
    """

    forward_flops: float
    backward_flops: float
    moved: int
    saved_inputs: tuple[bool, ...]
    saved_bytes: int


def work_of(one: Operator, device: torch.device) -> Work:
    """What an operator takes: by a run on fake tensors, or, where it does not run on them, by its tensors' bytes alone."""
    with fake_tensor_mode(), quiet_fake_kernels(), torch.enable_grad():
        try:
            return _measured(one.call, device)
        except RuntimeError:  # an operator without a fake kernel, or a gradient for its dtype
            call = one.call
            moved = sum(spec.num_bytes for spec in (*call.tensors, *call.outputs))
            return Work(0.0, 0.0, moved, (True,) * len(call.tensors), 0)


def _measured(call: Call, device: torch.device) -> Work:
    inputs: list[torch.Tensor] = []

    def made(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            inputs.append(torch.empty(value.known_shape, dtype=value.dtype, device=device))
            return inputs[-1].requires_grad_(value.is_float and value.requires_grad)
        return type(value)(made(item) for item in value) if isinstance(value, (tuple, list)) else value

    args, kwargs = made(call.args), {name: made(value) for name, value in call.kwargs.items()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[_memory(tensor)] = tensor
        return tensor

    with FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            results = call.operator(*args, **kwargs)
        forward = counter.get_total_flops()
        outputs = [value for value in _each(results) if isinstance(value, torch.Tensor)]
        gradients = [value for value in outputs if value.requires_grad]
        if gradients:
            torch.autograd.backward(gradients, [torch.empty_like(value) for value in gradients])
        total = counter.get_total_flops()
    sources, made_here = [_memory(x) for x in inputs], [_memory(x) for x in outputs]
    view = all(memory in sources for memory in made_here)
    moved = 0 if view else sum(spec.num_bytes for spec in (*call.tensors, *call.outputs))
    other = sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in (*sources, *made_here))
    return Work(
        float(forward),
        float(total - forward),
        moved,
        tuple(memory in kept for memory in sources),
        other,
    )


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


@dataclass(frozen=True)
class Prices:
    """Seconds on a cluster whose ``degree`` neighbouring ranks divide the operators.

    Attributes:
        hardware: the figures of devices and links; each says where it is from.
        groups: the ranks that divide.
        compute_dtype: dtype of matrix products, as torch names it.
    """

    hardware: Hardware
    groups: Groups
    degree: int
    compute_dtype: str

    @classmethod
    def of(cls, model: nn.Module, cluster: Cluster, degree: int) -> Prices:
        """As :meth:`on`, in the dtype of a model's first parameter."""
        dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        return cls.on(cluster, degree, str(dtype).removeprefix("torch."))

    @classmethod
    def on(cls, cluster: Cluster, degree: int, compute_dtype: str) -> Prices:
        """The prices on neighbouring ranks of a cluster.

        Raises:
            InputError: if the table does not know the cluster's device.
        """
        known = cluster.with_hardware()
        assert known.hardware is not None
        within = min(degree, max(1, known.local_world_size))
        return cls(known.hardware, Groups(np.array([degree]), np.array([within])), degree, compute_dtype)

    @property
    def device(self) -> Device:
        """One rank's device."""
        return self.hardware.device

    def seconds(self, one: Operator, rule: Rule, work: Work) -> float:
        """Forward and backward pass of one rank's part of a call."""
        call = one.call
        share = 1 / self.degree if rule.divides else 1.0
        flops = (
            share * (work.forward_flops + work.backward_flops) / self.device.products_of(self.compute_dtype)
        )
        if not work.moved:
            return self.device.launch_s
        local = sum(
            self._local(spec, placement)
            for spec, placement in zip(
                (*call.tensors, *call.outputs), (*rule.inputs, *rule.outputs), strict=True
            )
        )
        passes = 1 + _BACKWARD * any(spec.requires_grad for spec in call.outputs)
        return self.device.launch_s * passes + max(flops, passes * local / self.device.memory_bytes_per_s)

    def _local(self, spec: TensorSpec, placement: Placement) -> float:
        return spec.num_bytes / (self.degree if placement.is_shard() else 1)

    def gradient_sum(self, spec: TensorSpec) -> tuple[float, float]:
        """Seconds and bytes exchanged of summing the gradient of a whole parameter: it travels in a bucket with others."""
        if not spec.requires_grad:
            return 0.0, 0.0
        sizes = (float(spec.num_bytes), 0.0)
        whole, empty = (
            float(collective_seconds("all_reduce", size, self.groups, self.hardware)[0]) for size in sizes
        )
        return whole - empty * (1 - min(1.0, spec.num_bytes / DEFAULT_BUCKET_BYTES)), float(spec.num_bytes)

    def conversion(self, spec: TensorSpec, source: Placement, need: Need) -> tuple[float, float]:
        """Seconds and bytes exchanged of a conversion of one value, forward and backward."""
        seconds = moved = 0.0
        for step in steps(source, need):
            kinds = (step.forward, step.backward if spec.requires_grad else "")
            for kind in filter(None, kinds):
                seconds += float(collective_seconds(kind, spec.num_bytes, self.groups, self.hardware)[0])
                moved += spec.num_bytes
            seconds += self.device.launch_s
        return seconds, moved
