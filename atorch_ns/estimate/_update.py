"""Seconds of the optimizer's update, and of what is moved between device and host."""

from __future__ import annotations

import numpy as np

from atorch_ns.estimate._host_work import update_operators
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._units import DTYPE_BYTES, stored_dtype
from atorch_ns.profile import ParameterSpec

__all__ = ["offload_seconds", "update_seconds"]

_IN_PLACE = (3, 8, 17)
"""Tensors that an optimizer with 0, 1, 2 states reads or writes in place for each parameter, operator by operator:
SGD reads two and writes one; momentum adds ``mul_`` and ``add_``; Adam runs seven operators in place."""
_FRESH = (0, 0, 4)
"""The same for operators that make new tensors: Adam's root and its quotient."""
_FUSED = (3, 5, 7)
"""The same for one kernel: the parameter, its gradient and its states are read once, all but the gradient written."""


def update_seconds(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """[R] seconds of moving states, and [R] operators started on the host."""
    trainable = _trainable(scene)
    optimizer = scene.trace.optimizer
    num_states = min(2, len(optimizer.state_dtypes)) if optimizer else 0
    fused = optimizer is not None and optimizer.fused
    plan, device = scene.plan, scene.hardware.device
    num_elements = scene.elements(trainable=True)
    shards = scene.shards(plan.optimizer_over)
    updated = plan.master_dtype or plan.parameter_dtype
    share = num_elements / shards
    in_place = (_FUSED if fused else _IN_PLACE)[num_states] * share * DTYPE_BYTES.get(updated, 4)
    fresh = (0 if fused else _FRESH[num_states]) * share * DTYPE_BYTES.get(updated, 4)
    if plan.master_dtype is not None:  # gradients to new fp32 ones, masters into weights
        in_place, fresh = in_place + share * (4 + 2), fresh + share * (2 + 4)
    if plan.loss_scaling:  # gradients are read and written once to unscale them
        in_place = in_place + share * 8
    seconds = in_place / device.update_bytes_per_s + fresh / device.memory_bytes_per_s
    own = (
        len(trainable) / shards
        if plan.shard_layout == "parameters"
        else np.broadcast_to(_num_trainable(scene), shards.shape)
    )
    # The host updates, at about the speed of the link to it.
    if (plan.offload or plan.offload_optimizer) and device.type != "cpu":
        seconds = (in_place + fresh) / scene.hardware.to_host.rate.bytes_per_s
    return seconds, update_operators(plan, own, num_states, device.type, fused=fused)


def offload_seconds(scene: Scene) -> np.ndarray:
    """[R] seconds of moving shards of parameters to the device and of gradients back, for each micro-batch."""
    plan, device = scene.plan, scene.hardware.device
    if plan.offload_optimizer and device.type != "cpu":
        return _copied_weights(scene)
    if not plan.offload or device.type == "cpu":
        return np.zeros(len(scene.micro_batches))
    held = [p for unit in scene.units for p in unit.parameters * unit.count]
    shards = scene.shards(plan.parameters_over)
    whole = sum(p.num_elements * DTYPE_BYTES[stored_dtype(plan, p, None)] for p in held)
    num_bytes = whole * scene.elements(trainable=False) / max(1, sum(p.num_elements for p in held))
    passes = 1 if plan.keeps_gathered else 2
    rate = scene.hardware.to_host.rate
    per_pass = rate.latency_s * len(held) + num_bytes / shards / rate.bytes_per_s
    return np.asarray(scene.micro_batches * per_pass * passes + per_pass)


def _copied_weights(scene: Scene) -> np.ndarray:
    """[R] seconds of sending gradients to the host and updated weights back, once a step."""
    rate = scene.hardware.to_host.rate
    num_bytes = DTYPE_BYTES[scene.plan.parameter_dtype] + 4  # gradients in their own dtype, weights in fp32
    seconds = scene.elements(trainable=True) * num_bytes / rate.bytes_per_s
    return np.asarray(seconds + 2 * rate.latency_s * len(_trainable(scene))) * np.ones(
        len(scene.micro_batches)
    )


def _num_trainable(scene: Scene) -> np.ndarray | float:
    """[R] parameters on the rank that train."""
    own = [sum(p.trainable and p.tied_to is None for p in one.parameters) for one in scene.trace.segments]
    return scene.parts.total([float(count) for count in own])


def _trainable(scene: Scene) -> list[ParameterSpec]:
    return [p for unit in scene.units for p in unit.parameters * unit.count if p.trainable]
