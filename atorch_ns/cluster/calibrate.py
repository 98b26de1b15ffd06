"""Calibration: measured speeds of the devices and links of this job, in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from atorch_ns.cluster.cluster import Cluster, cpu_hardware
from atorch_ns.cluster.hardware import LINKS, Device, Hardware, Link, Rate
from atorch_ns.cluster.speed_probes import (
    ComputeSpeed,
    compute_probes,
    compute_speed,
    fit_rates,
    link_probes,
    measured_overlap,
)
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist


_MIN_ROUNDS, _MAX_ROUNDS = 3, 9
_DEFAULT_SECONDS = 10.0

Probe = Callable[[], float]
"""Runs an action once and returns its seconds."""


def calibrate(
    cluster: Cluster, *, group: dist.ProcessGroup | None = None, seconds: float = _DEFAULT_SECONDS
) -> Hardware:
    """Measures devices and links; collective over ``group``, and all its ranks return equal figures.

    All ranks compute at the same time, as they do in training, so ranks that share cores or memory get what
    is left to each. Every figure is measured in several rounds; its median on the slowest rank counts. A
    third of ``seconds`` is usually enough.

    Args:
        cluster: the cluster of this job.
        group: process group of the ranks; ``None`` for all, or for this process alone without a process group.
        seconds: approximate time limit.
    """
    import torch.distributed as dist

    if seconds <= 0:
        raise InputError(f"seconds={seconds}: give a positive number.")
    together = dist.is_available() and dist.is_initialized()
    known = _starting_point(cluster)
    with _levels(cluster, group, together=together) as levels:
        probes = compute_probes(cluster.device)
        for level, ranks in levels.items():
            probes |= {f"{level}/{name}": probe for name, probe in link_probes(ranks, cluster.device).items()}
        times = _measure(probes, seconds / 3, group, together=together, device=cluster.device)
        sizes = {level: dist.get_world_size(ranks) for level, ranks in levels.items()}
    device = _measured_device(known.device, compute_speed(times))
    links = {level: _measured_link(known, level, times, sizes[level]) for level in sizes}
    within = links.get("within_node", known.within_node)
    return replace(
        known,
        device=device,
        within_node=within,
        between_nodes=links.get("between_nodes", within if cluster.num_nodes == 1 else known.between_nodes),
        measured=True,
    )


def _starting_point(cluster: Cluster) -> Hardware:
    """The table's figures, or for a device that it lacks any that the measurement then replaces."""
    try:
        hardware = cluster.with_hardware().hardware
    except InputError:
        like = cpu_hardware(cluster.local_world_size, cluster.device_memory_bytes)
        device = replace(
            like.device, name=cluster.device_name, type=cluster.device_type, capability=cluster.capability
        )
        links = {name: LINKS[name].link(name, cluster.local_world_size) for name in ("pcie4", "eth100")}
        return Hardware(
            device=device, within_node=links["pcie4"], between_nodes=links["eth100"], to_host=links["pcie4"]
        )
    assert hardware is not None
    return hardware


@contextmanager
def _levels(
    cluster: Cluster, group: dist.ProcessGroup | None, *, together: bool
) -> Iterator[dict[str, dist.ProcessGroup]]:
    """The groups to measure links in, by the field of :class:`Hardware` that each is for."""
    import torch.distributed as dist

    if not together or dist.get_world_size(group) == 1:
        yield {}
        return
    default = group or dist.group.WORLD
    assert default is not None
    if group is not None or cluster.num_nodes == 1 or cluster.world_size != dist.get_world_size():
        yield {"within_node" if cluster.num_nodes == 1 else "between_nodes": default}
        return
    ranks, per_node = np.arange(cluster.world_size).reshape(cluster.num_nodes, -1), cluster.local_world_size
    made: dict[str, dist.ProcessGroup] = {}
    if per_node > 1:
        made["within_node"] = dist.new_subgroups_by_enumeration(ranks.tolist())[0]
    made["between_nodes"] = dist.new_subgroups_by_enumeration(ranks.T.tolist())[0]
    try:
        yield made
    finally:
        for each in made.values():
            dist.destroy_process_group(each)


def _measure(
    probes: dict[str, Probe],
    seconds: float,
    group: dist.ProcessGroup | None,
    *,
    together: bool,
    device: str,
) -> dict[str, float]:
    """The median seconds of each probe over rounds, the maximum over ranks; a first round warms up."""
    rounds: list[list[float]] = []
    started = time.perf_counter()
    for number in range(_MAX_ROUNDS + 1):
        taken = [probe() for probe in probes.values()]
        if number > 0:
            rounds.append(taken)
        elapsed = time.perf_counter() - started
        if together:
            elapsed = _maximum([elapsed], group, device)[0]
        if len(rounds) >= _MIN_ROUNDS and elapsed * (number + 2) / (number + 1) > seconds:
            break
    medians = np.median(np.asarray(rounds), axis=0).tolist()
    return dict(zip(probes, _maximum(medians, group, device) if together else medians, strict=True))


def _maximum(values: list[float], group: dist.ProcessGroup | None, device: str) -> list[float]:
    import torch
    import torch.distributed as dist

    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in shared.tolist()]


def _measured_device(known: Device, speed: ComputeSpeed) -> Device:
    return replace(
        known,
        flops_per_s={**known.flops_per_s, **speed.flops_per_s},
        memory_bytes_per_s=speed.memory_bytes_per_s,
        in_place_bytes_per_s=speed.in_place_bytes_per_s,
        launch_s=speed.launch_s,
        efficiency=1.0,
        source="measured",
    )


def _measured_link(known: Hardware, level: str, times: dict[str, float], num_ranks: int) -> Link:
    link: Link = getattr(known, level)
    of_level = {
        name.removeprefix(f"{level}/"): value for name, value in times.items() if name.startswith(level)
    }
    rates = fit_rates(of_level, num_ranks)
    usual = rates.get("all_reduce", link.rate)
    return replace(
        link,
        rate=Rate(usual.latency_s, usual.bytes_per_s),
        collectives=rates,
        overlap=measured_overlap(of_level),
        source="measured",
    )
