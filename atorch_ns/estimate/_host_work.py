"""What a step costs the host besides the model's own operators, in units of starting one operator.

Measured on a CPU as the growth of a step's time with the number of tiny blocks, in one process, over the time of
one operator in a small model (with its module, its autograd node and its views, as
:attr:`~atorch_ns.cluster.Device.launch_s` has it). In these units the figures move little between machines: all
are Python.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._units import Unit
from atorch_ns.profile import Segment
from atorch_ns.strategy import Plan

__all__ = ["communication_operators", "recompute_operators", "update_operators"]

_GATHER: Final = (24.0, 1.0)
"""For each unit and each of its parameters, at every gather: hooks, buffers, views."""
_REDUCE: Final = (32.0, 3.0)
"""The same at every reduction, with the sharded gradients made."""
_PASS: Final = (8.0, 1.0)
"""The same at every backward pass that only accumulates."""
_BUCKETED: Final = 1.0
"""For each parameter whose gradient is copied to a bucket."""
_BROADCAST: Final = 2.0
"""For each updated parameter that is sent to the others."""
_RECOMPUTED: Final = 40.0
"""For each recomputed block: saved-tensor hooks, random states, the error checks of the second pass."""
_GUARDED: Final = 16.0
"""For each compiled block, forward and backward: guards and the calls around the graph."""
_UPDATE: Final = (0.5, 1.2, 4.0)
"""For each parameter of an optimizer with 0, 1, 2 states, operator by operator; Adam's step counter included."""
_UPDATE_FUSED: Final = 0.65
"""The same where one call updates all: lists of tensors are taken apart, and step counters added to."""
_DTENSOR: Final = 5.0
"""An operator on a DTensor, as parameters sharded by rows are, over one on a plain tensor."""
_FOREACH_GPU: Final = 0.1
"""Of these, where all parameters are updated by a few foreach kernels, as on GPUs."""


def recompute_operators(plan: Plan, segment: Segment, share: float) -> float:
    """Beside the operators themselves, for one instance of which a share is recomputed, in one micro-batch."""
    compiled = _GUARDED if plan.compiled and segment.is_block else 0.0
    return share * _RECOMPUTED + compiled


def communication_operators(scene: Scene) -> np.ndarray:
    """[R] of a step, for gathering, reducing and sending parameters and gradients."""
    plan, passes = scene.plan, scene.micro_batches
    none = np.zeros(len(passes))
    if plan.gradient_sync == "none":
        return none
    units = scene.units
    trainable = sum(scene.count(unit) * len(unit.parameters) for unit in units)
    total = none
    if plan.gradient_sync == "all_reduce" or plan.shard_layout == "parameters":
        total = total + _BUCKETED * trainable
        return total + (_BROADCAST * trainable if plan.optimizer_over else 0.0)
    for unit in units:
        gathers = 1 if unit.is_root or plan.keeps_gathered else 2
        each = (
            gathers * passes * _cost(_GATHER, unit) + _cost(_REDUCE, unit) + (passes - 1) * _cost(_PASS, unit)
        )
        total = total + scene.count(unit) * each
    return np.asarray(total)


def _cost(figures: tuple[float, float], unit: Unit) -> float:
    constant, per_parameter = figures
    return constant + per_parameter * len(unit.parameters)


def update_operators(
    plan: Plan, num_parameters: np.ndarray, num_states: int, device: str, *, fused: bool = False
) -> np.ndarray:
    """[R] for updating so many parameters on the rank that has most."""
    each = _UPDATE_FUSED if fused else _UPDATE[num_states]
    if plan.shard_layout == "rows" and plan.optimizer_over:
        each *= _DTENSOR
    if plan.master_dtype is not None:
        each += 2.0
    if device != "cpu" and not fused:
        each *= _FOREACH_GPU
    return num_parameters * each
