"""What the calls of a traced model take on this cluster, for the cut and the schedule to be chosen by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from atorch_ns.cluster import Cluster, Hardware
from atorch_ns.errors import InputError
from atorch_ns.pipeline import BlockCosts, CallGraph, plan_crossings, split_backward
from atorch_ns.profile import NamedModule, repeated_blocks
from atorch_ns.strategy import Plan

__all__ = ["block_paths", "call_costs", "known_hardware", "parameter_bytes"]


def call_costs(
    graph: CallGraph,
    units: Sequence[NamedModule],
    plan: Plan,
    hardware: Hardware,
    *,
    refused: Collection[int],
    blocks: Collection[str],
) -> BlockCosts:
    """Seconds and bytes of every call.

    A call computes for as long as its operations take and moves memory for as long as its bytes take. Both are
    added, as for models of many small operators; only their proportions matter for a cut.

    Args:
        graph: the calls.
        units: what they call.
        plan: tells what is sharded and what is recomputed.
        hardware: the speeds of device and links.
        refused: positions that cannot be cut.
        blocks: paths of the repeated blocks.
    """
    device, link = hardware.device, hardware.within_node.rate_of("send")
    flops = device.flops_of(plan.compute_dtype or plan.parameter_dtype) * device.efficiency
    forward = tuple(call.flops / flops + call.moved_bytes / device.memory_bytes_per_s for call in graph.calls)
    again = tuple(
        seconds if _recomputed(plan, call.path, blocks) else 0.0
        for seconds, call in zip(forward, graph.calls, strict=True)
    )
    for_input, for_weight = split_backward([2 * seconds for seconds in forward], again)
    sizes = _cut_bytes(graph, refused)
    return BlockCosts(
        forward=forward,
        backward_input=for_input,
        backward_weight=for_weight,
        backward=tuple(2 * seconds + more for seconds, more in zip(forward, again, strict=True)),
        send=tuple(link.latency_s + size / link.bytes_per_s for size in sizes),
        state_bytes=tuple(size * _copies(plan) for size in parameter_bytes(units, graph)),
        activation_bytes=tuple(
            float(
                _argument_bytes(graph, number) if _recomputed(plan, call.path, blocks) else call.saved_bytes
            )
            for number, call in enumerate(graph.calls)
        ),
        boundary_bytes=sizes,
        allowed_cuts=[cut for cut in range(1, len(graph.calls)) if cut not in refused],
    )


def known_hardware(cluster: Cluster) -> Hardware:
    """The speeds of devices and links; a CPU's, whose proportions will do, where nobody knows the device."""
    try:
        found = cluster.with_hardware().hardware
    except InputError:
        found = replace(cluster, device_type="cpu", hardware=None).with_hardware().hardware
        assert found is not None
        found = replace(found, device=replace(found.device, memory_bytes=cluster.device_memory_bytes))
    assert found is not None
    return found


def parameter_bytes(units: Sequence[NamedModule], graph: CallGraph) -> list[int]:
    """Bytes of the parameters of each call's unit; of those that several calls use, with the first."""
    modules = {unit.name: unit.module for unit in units}
    counted: set[int] = set()
    found = []
    for path in graph.paths:
        new = [p for p in modules[path].parameters() if id(p) not in counted]
        counted.update(map(id, new))
        found.append(sum(p.numel() * p.element_size() for p in new))
    return found


def block_paths(model: torch.nn.Module) -> set[str]:
    """Paths of the repeated blocks."""
    return {block.name for block in repeated_blocks(model)}


def _copies(plan: Plan) -> float:
    """Bytes on a rank for each byte of a parameter: itself, its gradient, and two moments as of Adam."""
    shares = [plan.size(axes) for axes in (plan.parameters_over, plan.gradients_over, plan.optimizer_over)]
    divided = plan.size("tensor")
    return (1 / shares[0] + 1 / shares[1] + 2 / shares[2]) / divided


def _recomputed(plan: Plan, path: str, blocks: Collection[str]) -> bool:
    return plan.recompute == "blocks" and plan.recomputed is None and path in blocks


def _argument_bytes(graph: CallGraph, number: int) -> int:
    arguments = set(graph.calls[number].arguments)
    return sum(
        graph.values[value].spec.num_bytes for value in arguments if graph.values[value].last_call >= 0
    )


def _cut_bytes(graph: CallGraph, refused: Collection[int]) -> tuple[float, ...]:
    return tuple(
        0.0 if cut in refused else float(plan_crossings(graph, [cut])[0].num_bytes)
        for cut in range(1, len(graph.calls))
    )
