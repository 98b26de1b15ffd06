"""Operators of one rank's step: their share of its work and of its memory traffic."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from atorch_ns.estimate import Workload
from atorch_ns.profile import Trace, precision_key
from atorch_ns.strategy import Plan


class OperatorLine(NamedTuple):
    """One kind of operator, over all segments, forward and backward, recomputation left out.

    Attributes:
        name: name of the operator, as ``aten.mm``.
        calls: calls in one step.
        flops, num_bytes: floating point operations; bytes read and written.
        flops_share, bytes_share: shares of the whole step.
        mostly_in: the segment that has most of it.
    """

    name: str
    calls: int
    flops: float
    num_bytes: float
    flops_share: float
    bytes_share: float
    mostly_in: str


class OperatorsInfo(NamedTuple):
    """The operators of one rank's step.

    Attributes:
        lines: operators, those with the greatest share of either first.
        precision: the key of the costs that were read.
        num_samples: samples of one rank in a step.
        flops, num_bytes: totals of the whole step.
    """

    lines: tuple[OperatorLine, ...]
    precision: str
    num_samples: float
    flops: float
    num_bytes: float


def operators_info(
    trace: Trace, plan: Plan, workload: Workload, *, world_size: int, top: int = 10
) -> OperatorsInfo:
    """The ``top`` operators of a plan's step on one rank.

    Args:
        trace: trace with operators.
        plan: plan with its precision and number of micro-batches.
        workload: workload of all ranks.
        world_size: number of processes, for a plan without a mesh.
        top: lines at most.
    """
    key = precision_key(plan.precision.parameter_dtype, plan.precision.compute_dtype)
    key = key if key in trace.precisions else trace.precisions[0]  # any that was profiled
    num_micro_batches = plan.num_micro_batches
    ranks = plan.num_data_ranks if plan.axes else world_size  # ranks that see different data
    samples = workload.global_batch / (ranks * num_micro_batches)  # of a micro-batch on one rank
    calls: Counter[str] = Counter()
    flops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # by operator and segment
    traffic: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    # Costs are those of one micro-batch in one segment, forward and backward.
    for segment in trace.segments:
        times = segment.count * num_micro_batches  # segments that are alike were traced once
        for operator in segment.costs[key].operators:
            calls[operator.name] += operator.count * times
            for table, cost in ((flops, operator.flops), (traffic, operator.moved)):
                table[operator.name][segment.name] += cost.at(samples, workload.num_tokens) * times
    all_flops, all_bytes = (sum(sum(each.values()) for each in table.values()) for table in (flops, traffic))
    lines = []
    for name in calls:
        of_flops, of_bytes = sum(flops[name].values()), sum(traffic[name].values())
        by_segment = flops[name] if of_flops else traffic[name]  # some operators only move bytes
        line = OperatorLine(
            name=name,
            calls=calls[name],
            flops=of_flops,
            num_bytes=of_bytes,
            flops_share=of_flops / all_flops if all_flops else 0.0,
            bytes_share=of_bytes / all_bytes if all_bytes else 0.0,
            mostly_in=max(by_segment, key=by_segment.__getitem__),
        )
        lines.append(line)
    lines.sort(key=lambda line: (-max(line.flops_share, line.bytes_share), line.name))
    return OperatorsInfo(tuple(lines[:top]), key, samples * num_micro_batches, all_flops, all_bytes)
