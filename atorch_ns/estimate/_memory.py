"""Peak memory of plans.

Legend: N plans, R of them of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atorch_ns.estimate._activations import Activations
from atorch_ns.estimate._estimate import MemoryParts, Workload
from atorch_ns.estimate._moments import Kind, Moment, moment_names
from atorch_ns.estimate._owned import flattened_moments, owned_moments
from atorch_ns.estimate._replicated import replicated_moments
from atorch_ns.estimate._sharded import sharded_moments
from atorch_ns.estimate._states import kept_of, parameters_of, shares_of
from atorch_ns.estimate._table import PlanTable
from atorch_ns.profile import Trace

__all__ = ["price_memory"]


def price_memory(
    table: PlanTable, trace: Trace, workload: Workload, *, device_type: str = "cpu"
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """The peak of every plan, in bytes of tensors on the rank that holds most, in parts.

    Workspaces inside kernels are not known: oneDNN's products in 16 bits take some 100 KiB on a CPU.

    Args:
        table: the plans.
        trace: of the model.
        workload: the batch.
        device_type: ``"cpu"`` or ``"cuda"``: on the CPU, gloo's collectives work on copies, and what is
            offloaded is in the same memory.

    Returns:
        [N, 6] columns as :class:`MemoryParts`; [N] at which moment; and the moments in words.
    """
    memory = np.zeros((len(table), len(MemoryParts._fields)))
    worst = np.zeros(len(table), dtype=np.int64)
    for index in range(len(table.templates)):
        rows = np.flatnonzero(table.template == index)
        if rows.size:
            memory[rows], worst[rows] = _price(_kind(table, index, rows, trace, workload, device_type))
    return memory, worst, moment_names(trace)


def _kind(
    table: PlanTable, index: int, rows: np.ndarray, trace: Trace, workload: Workload, device_type: str
) -> Kind:
    plan = table.templates[index]
    data, zero, micro = table.data[rows], table.zero[rows], table.micro_batches[rows]
    # States are divided over the axis `zero` where there is one, whatever axes the template was made for.
    degrees, row = np.unique(np.where(zero > 1, zero, data), return_inverse=True)
    parameters = parameters_of(trace, plan)
    shares = shares_of(plan, parameters, trace.optimizer, degrees)
    num_samples = np.ceil(workload.global_batch / (data * zero * micro))
    return Kind(
        plan=plan,
        trace=trace,
        activations=Activations(plan, trace, num_samples, workload.num_tokens),
        parameters=parameters,
        shares=shares,
        kept=kept_of(plan, parameters, shares, trace.optimizer),
        row=row.reshape(-1),
        degree=degrees[row].reshape(-1),
        num_ranks=data * zero,
        micro_batches=micro,
        is_cpu=device_type == "cpu",
    )


def _price(kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """[R, 6] parts and [R] moment."""
    moments = list(_moments(kind))
    totals = np.stack([moment.gradients + moment.activations + moment.temporaries for moment in moments])
    chosen = totals.argmax(axis=0)
    rows = np.arange(len(chosen))
    gradients, activations, temporaries = (
        np.stack([getattr(moment, name) for moment in moments])[chosen, rows]
        for name in ("gradients", "activations", "temporaries")
    )
    trace, plan, acts = kind.trace, kind.plan, kind.activations
    batch = trace.batch_bytes.at(acts.num_samples * kind.micro_batches, acts.num_tokens)
    buffers = sum(segment.buffer_bytes * segment.count for segment in trace.segments)
    weights = float((kind.parameters.elements * kind.parameters.itemsize * kind.parameters.copies).sum())
    on_device = 0.0 if kind.offloads else 1.0
    columns = {
        "parameters": kind.kept.parameters[kind.row] * on_device + buffers,
        "gradients": gradients + weights * sum(extra.gradient_copies for extra in plan.extras),
        "optimizer": kind.kept.optimizer[kind.row] * on_device,
        "activations": activations + batch,
        "temporaries": temporaries + weights * sum(extra.parameter_copies for extra in plan.extras),
        "reserve": np.full(len(rows), float(sum(extra.fixed_bytes for extra in plan.extras))),
    }
    names = np.asarray([moment.name for moment in moments])
    return np.stack([columns[name] for name in MemoryParts._fields], axis=1), names[chosen]


def _moments(kind: Kind) -> Iterator[Moment]:
    plan = kind.plan
    if plan.updates_copy:
        return flattened_moments(kind)
    if plan.gradient_sync == "reduce_scatter":
        return sharded_moments(kind) if plan.parameters_over else owned_moments(kind)
    return replicated_moments(kind)
