"""Step time of all plans of one kind, which differ in sizes only.

A step is priced as its passes over the segments of the model (see :mod:`._passes`), what is communicated
between them (:mod:`._exchange`) and beside them (:mod:`._traffic`), what a pipeline's ranks wait for each other
(:mod:`._pipeline`), and the optimizer's update.
"""

from __future__ import annotations

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.estimate._estimate import TimeParts, Workload
from atorch_ns.estimate._exchange import exchanges_of, partial_sums
from atorch_ns.estimate._host_work import communication_operators
from atorch_ns.estimate._memo import Memo
from atorch_ns.estimate._parts import Sizes
from atorch_ns.estimate._passes import offloaded_activations, passes_of, segments_of
from atorch_ns.estimate._pipeline import as_pipeline
from atorch_ns.estimate._ring import collective_seconds
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._traffic import gather_and_reduce
from atorch_ns.estimate._units import computed_in
from atorch_ns.estimate._update import offload_seconds, update_seconds
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan

__all__ = ["price_kind"]

_STEP_OPERATORS = 30
"""Operators of a step that belong to no segment: preparing the batch, the loss's mean, bookkeeping."""


def price_kind(
    plan: Plan, sizes: Sizes, trace: Trace, cluster: Cluster, workload: Workload, memo: Memo
) -> np.ndarray:
    """[R, 9] seconds, columns as :class:`TimeParts`, of a template with R choices of sizes.

    Args:
        plan: what the rows have in common; its sizes are not read.
        sizes: of R plans.
        trace: what one step of the model costs.
        cluster: with hardware.
        workload: samples and tokens of a step.
        memo: of the pricing.
    """
    scene = Scene.of(plan, sizes, trace, cluster, workload, memo)
    computing = _computing(plan)
    segments = memo.get(("seconds", computing, id(scene.parts)), lambda: segments_of(scene))
    key = ("exchanges", computing, scene.order, id(scene.parts))
    exchanges = memo.get(key, lambda: exchanges_of(scene))
    scene, waiting = as_pipeline(scene, segments, exchanges)
    passes = passes_of(scene, segments)
    compute = passes.compute + waiting.twice
    gather, reduce = gather_and_reduce(scene, passes)
    update, update_operators = update_seconds(scene)
    offload = offload_seconds(scene) + offloaded_activations(scene)
    exchange = scene.micro_batches * scene.parts.total([each.seconds for each in exchanges])
    device_seconds = compute + passes.recompute + gather + reduce + update + offload + exchange
    operators = passes.operators + communication_operators(scene) + update_operators + _STEP_OPERATORS
    operators = operators + scene.micro_batches * scene.parts.total([each.operators for each in exchanges])
    parts = {
        "compute": compute,
        "recompute": passes.recompute,
        "gather": gather,
        "reduce": reduce + partial_sums(scene),
        "optimizer": update,
        "offload": offload,
        "bubble": waiting.bubble,
        "overhead": _overhead(scene, operators, device_seconds),
        "exchange": exchange + waiting.sends,
    }
    columns = np.empty((len(sizes), len(TimeParts._fields)))
    for place, name in enumerate(TimeParts._fields):
        columns[:, place] = parts[name]
    return columns


def _computing(plan: Plan) -> tuple[object, ...]:
    """What of a plan decides how long its passes take."""
    recomputed = (plan.recompute, plan.recompute_every, plan.recomputed, plan.saved_operators)
    return (
        *computed_in(plan),
        plan.narrow,
        plan.replaced,
        plan.compiled,
        plan.compiler,
        plan.extras,
        *recomputed,
    )


def _overhead(scene: Scene, operators: np.ndarray, device_seconds: np.ndarray) -> np.ndarray:
    """[R] seconds of starting operators that nothing hides, and of what every step does besides.

    A GPU runs behind its host, so only what the host takes longer counts; a CPU is the host.
    """
    device = scene.hardware.device
    host = operators * device.launch_s
    exposed = host if device.type == "cpu" else np.maximum(0.0, host - device_seconds)
    given = sum(extra.seconds_per_step for extra in scene.plan.extras)
    loss = collective_seconds("all_reduce", 4.0, scene.data_groups, scene.hardware)
    flags = loss if scene.plan.loss_scaling else 0.0
    return np.asarray(exposed + given + loss + flags)
