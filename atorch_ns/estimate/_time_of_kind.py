"""Step time of all plans of one kind, which differ in sizes only.

A step is priced as its passes over the segments of the model (see :mod:`._passes`), what is communicated
beside them (:mod:`._traffic`), and the optimizer's update.
"""

from __future__ import annotations

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate._estimate import TimeParts, Workload
from atorch_ns.estimate._host_work import communication_operators
from atorch_ns.estimate._passes import passes_of
from atorch_ns.estimate._ring import collective_seconds
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._traffic import gather_and_reduce
from atorch_ns.estimate._update import offload_seconds, update_seconds
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan

__all__ = ["price_kind"]

_STEP_OPERATORS = 30
"""Operators of a step that belong to no segment: preparing the batch, the loss's mean, bookkeeping."""


def price_kind(
    plan: Plan,
    data: np.ndarray,
    zero: np.ndarray,
    micro_batches: np.ndarray,
    trace: Trace,
    cluster: Cluster,
    workload: Workload,
) -> np.ndarray:
    """[R, 8] seconds, columns as :class:`TimeParts`, of a template with R choices of sizes.

    Args:
        plan: what the rows have in common; its sizes of ``data`` and ``zero`` are not read.
        data, zero, micro_batches: [R] sizes.
        trace: what one step of the model costs.
        cluster: with hardware.
        workload: samples and tokens of a step.
    """
    scene = Scene.of(plan, data, zero, micro_batches, trace, cluster, workload)
    passes = passes_of(scene)
    gather, reduce = gather_and_reduce(scene, passes)
    update, update_operators = update_seconds(scene)
    offload = offload_seconds(scene)
    device_seconds = passes.compute + passes.recompute + gather + reduce + update + offload
    operators = passes.operators + communication_operators(scene) + update_operators + _STEP_OPERATORS
    parts = {
        "compute": passes.compute,
        "recompute": passes.recompute,
        "gather": gather,
        "reduce": reduce,
        "optimizer": update,
        "offload": offload,
        "bubble": np.zeros(len(data)),
        "overhead": _overhead(scene, operators, device_seconds),
    }
    return np.stack([np.broadcast_to(parts[name], data.shape) for name in TimeParts._fields], axis=1)


def _overhead(scene: Scene, operators: np.ndarray, device_seconds: np.ndarray) -> np.ndarray:
    """[R] seconds of starting operators that nothing hides, and of what every step does besides.

    A GPU runs behind its host, so only what the host takes longer counts; a CPU is the host.
    """
    device = scene.hardware.device
    host = operators * device.launch_s
    exposed = host if device.type == "cpu" else np.maximum(0.0, host - device_seconds)
    given = sum(extra.seconds_per_step for extra in scene.plan.extras)
    loss = collective_seconds("all_reduce", 4.0, scene.groups(("data", "zero")), scene.hardware)
    flags = loss if scene.plan.loss_scaling else 0.0
    return np.asarray(exposed + given + loss + flags)
