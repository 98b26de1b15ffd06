"""Prices of operators and conversions on a cluster: seconds, bytes exchanged and bytes held.

Each operator is run once on fake tensors, forward and backward. That gives its floating point operations, the
bytes that it moves and those that autograd saves; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from atorch_ns.capture.graph.call import Call, TensorSpec
from atorch_ns.capture.graph.operator_graph import Operator
from atorch_ns.capture.nests import tensors_of
from atorch_ns.cluster import Cluster
from atorch_ns.cluster.hardware import Device, Hardware
from atorch_ns.costs.collectives import DEFAULT_BUCKET_BYTES, Groups, collective_seconds
from atorch_ns.costs.count import OperatorCounter, OperatorCounts
from atorch_ns.costs.price import counted_seconds
from atorch_ns.operators.divided.conversions import ArgumentNeed, steps
from atorch_ns.operators.rules.rule import Placement, Rule
from atorch_ns.torch_compat import KernelsOfGpus, fake_tensor_mode, quiet_fake_kernels


@dataclass(frozen=True)
class Work:
    """The work of one undivided call of an operator.

    Attributes:
        forward, backward: operator counts of the two passes.
        is_view: whether all results are views of its arguments.
        saved_inputs: whether autograd keeps each tensor argument until the backward pass.
        saved_bytes: bytes of other saved tensors, such as a mask.
    """

    forward: OperatorCounts
    backward: OperatorCounts
    is_view: bool
    saved_inputs: tuple[bool, ...]
    saved_bytes: int

    def summing_gradients(self, outputs: Sequence[TensorSpec], readers: Sequence[int]) -> Work:
        """The work with the sum of gradients in the backward pass, by the number of readers per result."""
        backward = self.backward
        for spec, count in zip(outputs, readers, strict=True):
            if spec.requires_grad and count > 1:
                num_bytes = 3 * spec.num_bytes * (count - 1)  # an addition reads two and writes one
                backward += OperatorCounts(moved=num_bytes, num_operators=count - 1)
        return replace(self, backward=backward)


def work_of(op: Operator, device: torch.device, priced_for: str) -> Work:
    """The work of an operator, measured on fake tensors. If that fails, only its tensors' bytes count.

    Args:
        device: the device that the fake tensors claim to be on.
        priced_for: type of the device whose kernels are priced.
    """
    kernels = nullcontext() if priced_for == device.type else KernelsOfGpus()  # a CPU stands for a GPU
    with fake_tensor_mode(), quiet_fake_kernels(), torch.enable_grad(), kernels:
        try:
            return _measure_call(op.call, device)
        except RuntimeError:  # an operator without a fake kernel, or a gradient for its dtype
            call = op.call
            num_bytes = sum(spec.num_bytes for spec in (*call.tensors, *call.outputs))
            is_trained = any(spec.requires_grad for spec in call.outputs)
            # A backward pass reads what was saved and the gradient, and writes one.
            forward, backward = (
                OperatorCounts(moved=times * num_bytes, num_operators=times) for times in (1, 2 * is_trained)
            )
            return Work(forward, backward, False, (True,) * len(call.tensors), 0)


def _measure_call(call: Call, device: torch.device) -> Work:
    inputs: list[torch.Tensor] = []  # in the order of Call.tensors

    def build(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            inputs.append(torch.empty(value.known_shape, dtype=value.dtype, device=device))
            return inputs[-1].requires_grad_(value.is_float and value.requires_grad)
        return type(value)(build(item) for item in value) if isinstance(value, (tuple, list)) else value

    args, kwargs = build(call.args), {name: build(value) for name, value in call.kwargs.items()}
    saves: dict[int, torch.Tensor] = {}  # by memory, so that views of one tensor count once

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saves[_storage_id(tensor)] = tensor
        return tensor

    with OperatorCounter() as counter:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = tensors_of(call.operator(*args, **kwargs))
        gradients = [value for value in outputs if value.requires_grad]
        grad_outputs = [torch.empty_like(value) for value in gradients]
        forward, counter.counts = counter.counts, OperatorCounts()  # from here on the backward pass
        leaves = [value for value in inputs if value.requires_grad]
        if gradients and leaves:  # not backward(), which would copy a gradient that two arguments share
            torch.autograd.grad(gradients, leaves, grad_outputs, allow_unused=True)
    sources, results = [_storage_id(x) for x in inputs], [_storage_id(x) for x in outputs]
    other = sum(x.untyped_storage().nbytes() for key, x in saves.items() if key not in (*sources, *results))
    return Work(
        forward,
        counter.counts,
        all(memory in sources for memory in results),
        tuple(memory in saves for memory in sources),
        other,
    )


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class OperatorPrices:
    """Prices on a cluster where ``degree`` neighbouring ranks divide the operators.

    Attributes:
        hardware: figures of devices and links, each with its source.
        groups: the ranks that divide the operators.
        compute_dtype: dtype of matrix products, as torch names it.
    """

    hardware: Hardware
    groups: Groups
    degree: int
    compute_dtype: str

    @classmethod
    def of(cls, model: nn.Module, cluster: Cluster, degree: int) -> OperatorPrices:
        """Like :meth:`on`, in the dtype of a model's first parameter."""
        dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        return cls.on(cluster, degree, str(dtype).removeprefix("torch."))

    @classmethod
    def on(cls, cluster: Cluster, degree: int, compute_dtype: str) -> OperatorPrices:
        """Makes prices for neighbouring ranks of a cluster.

        Raises:
            InputError: if the table does not know the cluster's device.
        """
        machine = cluster.with_hardware()
        assert machine.hardware is not None
        within = min(degree, max(1, machine.local_world_size))  # ranks of the group on one node
        return cls(machine.hardware, Groups(np.array([degree]), np.array([within])), degree, compute_dtype)

    @property
    def device(self) -> Device:
        """One rank's device."""
        return self.hardware.device

    def seconds(self, op: Operator, rule: Rule, work: Work) -> tuple[float, float]:
        """Seconds of the forward and of the backward pass of one rank's part of a call."""
        call = op.call
        pairs = list(zip((*call.tensors, *call.outputs), (*rule.inputs, *rule.outputs), strict=True))
        whole = sum(spec.num_bytes for spec, _ in pairs)
        local = sum(self.local_bytes(spec, placement) for spec, placement in pairs)
        # Ranks divide operations evenly; a rank's bytes include arguments that are whole.
        share, part = 1 / self.degree if rule.divides else 1.0, local / (whole or 1)
        forward, backward = (
            counted_seconds(self.device, self.compute_dtype, counts, passes, share=share, part=part)
            for passes, counts in (("forward", work.forward), ("backward", work.backward))
        )
        return forward, backward

    def local_bytes(self, spec: TensorSpec, placement: Placement) -> float:
        """Bytes of a tensor on one rank."""
        return spec.num_bytes / (self.degree if placement.is_shard() else 1)

    def gradient_sum(self, spec: TensorSpec) -> tuple[float, float]:
        """Seconds and exchanged bytes to sum a whole parameter's gradient in a bucket with others."""
        if not spec.requires_grad:
            return 0.0, 0.0
        sizes = (float(spec.num_bytes), 0.0)
        whole, empty = (
            float(collective_seconds("all_reduce", size, self.groups, self.hardware)[0]) for size in sizes
        )
        # The gradient pays its share of the bucket's latency.
        return whole - empty * (1 - min(1.0, spec.num_bytes / DEFAULT_BUCKET_BYTES)), float(spec.num_bytes)

    def conversion(self, spec: TensorSpec, source: Placement, need: ArgumentNeed) -> tuple[float, float]:
        """Seconds and exchanged bytes to convert one value, forward and backward."""
        seconds = num_bytes = 0.0
        for step in steps(source, need):
            kinds = (step.forward, step.backward if spec.requires_grad else "")
            for kind in filter(None, kinds):
                seconds += float(collective_seconds(kind, spec.num_bytes, self.groups, self.hardware)[0])
                num_bytes += spec.num_bytes  # bytes of the whole value, for any collective
            seconds += self.device.launch_s
        return seconds, num_bytes
