"""Calibration: measured speeds of the devices and links of this job, in a few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from atorch_ns.cluster.cluster import Cluster, cpu_hardware
from atorch_ns.cluster.hardware import LINKS, Device, Hardware, Link, Rate
from atorch_ns.cluster.kernels import AttentionKind
from atorch_ns.cluster.speed_probes import (
    ComputeSpeed,
    compute_probes,
    compute_speed,
    fit_rates,
    link_probes,
    measured_overlap,
    probe_flops,
)
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist


T = TypeVar("T")

_MIN_ROUNDS, _MAX_ROUNDS = 3, 9
_DEFAULT_SECONDS = 10.0

_THOROUGH_ROUNDS: Final = 25

Probe = Callable[[], float]
"""Runs an action once and returns its seconds."""


class Measurement(NamedTuple):
    """Result of a calibration.

    Attributes:
        hardware: the figures that estimates use.
        table: the table's figures for the device and its links; ``None`` if it lacks the device.
        seconds: median seconds of every probe on the slowest rank, by name (a link's begins with the level).
        sizes: ranks of each level's groups.
    """

    hardware: Hardware
    table: Hardware | None
    seconds: Mapping[str, float]
    sizes: Mapping[str, int]


def calibrate(
    cluster: Cluster, *, group: dist.ProcessGroup | None = None, seconds: float = _DEFAULT_SECONDS
) -> Hardware:
    """Measures devices and links. All ranks of ``group`` return equal figures. Collective over ``group``.

    All ranks compute at the same time, as they do in training, so ranks that share cores or memory get what
    is left to each. Every figure is the slowest rank's median over several rounds. A
    third of ``seconds`` is usually enough.

    Args:
        group: process group of the ranks; ``None`` for all, or for this process if there is no group.
        seconds: approximate time limit.
    """
    return measure(cluster, group=group, seconds=seconds).hardware


def measure(
    cluster: Cluster,
    *,
    group: dist.ProcessGroup | None = None,
    seconds: float = _DEFAULT_SECONDS,
    thorough: bool = False,
    say: Callable[[str], None] | None = None,
) -> Measurement:
    """Runs :func:`calibrate` and also returns the timings.

    Args:
        thorough: whether to also time sends, and products and attention by size, while ``seconds`` last.
        say: called with a progress line now and then.
    """
    import torch.distributed as dist

    if not (seconds > 0 and math.isfinite(seconds)):
        raise InputError(f"seconds={seconds}: give a positive number.")
    together = dist.is_available() and dist.is_initialized()
    table = _of_table(cluster)
    base = cluster.hardware or table or _assumed_hardware(cluster)
    with _link_groups(cluster, group, together=together) as levels:
        probes = compute_probes(cluster.device, by_size=thorough)
        for level, ranks in levels.items():
            of_level = link_probes(ranks, cluster.device, sends=thorough)
            probes |= {f"{level}/{name}": probe for name, probe in of_level.items()}
        rounds = _Rounds(seconds if thorough else seconds / 3, _THOROUGH_ROUNDS if thorough else _MAX_ROUNDS)
        times = _measure_probes(probes, rounds, group, together=together, device=cluster.device, say=say)
        sizes = {level: dist.get_world_size(ranks) for level, ranks in levels.items()}
    source = _source_text(cluster, base.device.name)
    speed = compute_speed(times, on_gpu=cluster.device_type != "cpu")
    links = {level: _measured_link(base, level, times, sizes[level], source=source) for level in sizes}
    within = links.get("within_node", base.within_node)
    hardware = replace(
        base,
        device=_measured_device(base.device, speed, times, source),
        within_node=within,
        between_nodes=links.get("between_nodes", within if cluster.num_nodes == 1 else base.between_nodes),
        measured=True,
    )
    return Measurement(
        round_figures(hardware, Hardware), table, round_figures(times, dict[str, float]), sizes
    )


def _source_text(cluster: Cluster, device: str) -> str:
    nodes = f" on {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
    return f"measured on {cluster.world_size} × {device}{nodes}"


def round_figures(value: T, kind: Any) -> T:
    """The value in a type that pydantic reads. Floats keep four digits, more than a measurement has."""
    from pydantic import TypeAdapter

    adapter = TypeAdapter(kind)
    result: T = adapter.validate_python(_round_floats(adapter.dump_python(value)))
    return result


def _round_floats(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _round_floats(each) for name, each in plain.items()}
    return float(f"{plain:.4g}") if isinstance(plain, float) else plain


def _of_table(cluster: Cluster) -> Hardware | None:
    try:
        return replace(cluster, hardware=None).with_hardware().hardware
    except InputError:
        return None


def _assumed_hardware(cluster: Cluster) -> Hardware:
    like = cpu_hardware(cluster.local_world_size, cluster.device_memory_bytes)  # placeholders until measured
    device = replace(like.device, name=cluster.device_name, type="cuda", capability=cluster.capability)
    links = {name: LINKS[name].link(name, cluster.local_world_size) for name in ("pcie4", "eth100")}
    return Hardware(
        device=device, within_node=links["pcie4"], between_nodes=links["eth100"], to_host=links["pcie4"]
    )


@contextmanager
def _link_groups(
    cluster: Cluster, group: dist.ProcessGroup | None, *, together: bool
) -> Iterator[dict[str, dist.ProcessGroup]]:
    """The groups that measure links, by field of :class:`Hardware`."""
    import torch.distributed as dist

    if not together or dist.get_world_size(group) == 1:
        yield {}
        return
    default = group or dist.group.WORLD
    assert default is not None
    # One level only: the caller's own group, a single node, or a process group with other ranks.
    if group is not None or cluster.num_nodes == 1 or cluster.world_size != dist.get_world_size():
        yield {"within_node" if cluster.num_nodes == 1 else "between_nodes": default}
        return
    # [nodes, ranks of each]: rows talk within a node, columns between nodes.
    ranks, per_node = np.arange(cluster.world_size).reshape(cluster.num_nodes, -1), cluster.local_world_size
    groups: dict[str, dist.ProcessGroup] = {}
    if per_node > 1:
        groups["within_node"] = dist.new_subgroups_by_enumeration(ranks.tolist())[0]
    groups["between_nodes"] = dist.new_subgroups_by_enumeration(ranks.T.tolist())[0]
    try:
        yield groups
    finally:
        for each in groups.values():
            dist.destroy_process_group(each)


class _Rounds(NamedTuple):
    """Limits of a measurement in seconds and rounds. The seconds apply only after three rounds."""

    seconds: float
    most: int


def _measure_probes(
    probes: dict[str, Probe],
    limits: _Rounds,
    group: dist.ProcessGroup | None,
    *,
    together: bool,
    device: str,
    say: Callable[[str], None] | None,
) -> dict[str, float]:
    rounds: list[list[float]] = []
    start = time.perf_counter()
    for number in range(limits.most + 1):
        times = [probe() for probe in probes.values()]
        if number > 0:  # the first round warms up
            rounds.append(times)
        seconds = time.perf_counter() - start
        if together:
            seconds = _maximum_over_ranks([seconds], group, device)[0]  # all ranks stop in the same round
        if say is not None:
            what = f"round {number}" if number else "warmed up"
            say(f"{what}: {len(probes)} figures, {seconds:.1f} s of {limits.seconds:g} s")
        # Stop where one more round of average length would exceed the limit.
        if len(rounds) >= _MIN_ROUNDS and seconds * (number + 2) / (number + 1) > limits.seconds:
            break
    medians = np.median(np.asarray(rounds), axis=0).tolist()
    return dict(
        zip(probes, _maximum_over_ranks(medians, group, device) if together else medians, strict=True)
    )


def _maximum_over_ranks(values: list[float], group: dist.ProcessGroup | None, device: str) -> list[float]:
    import torch
    import torch.distributed as dist

    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in shared.tolist()]


def _measured_device(base: Device, speed: ComputeSpeed, times: Mapping[str, float], source: str) -> Device:
    rates = {dtype: base.products_of(dtype) for dtype in base.flops_per_s}  # kept where not measured
    device = replace(
        base,
        flops_per_s={**rates, **speed.flops_per_s},
        memory_bytes_per_s=speed.memory_bytes_per_s,
        in_place_bytes_per_s=speed.in_place_bytes_per_s,
        launch_s=speed.launch_s,
        efficiency=1.0,  # measured rates need no factor
        efficiencies={},
        attention_factors={},
        source=source,
    )
    return replace(device, attention_factors=_attention_factors(device, times))


def _attention_factors(device: Device, times: Mapping[str, float]) -> dict[str, float]:
    """Median ratio of measured to device rates of fused attention, by pass and dtype."""
    shares: dict[str, list[float]] = {}
    for name, seconds in times.items():
        what, *rest = name.split("/")
        if what != "attention":
            continue
        dtype, shape = rest
        whole = f"attention_training/{dtype}/{shape}"
        tokens, width = map(int, shape.split("x")[2:])  # shape is batch x heads x tokens x width
        work = {
            "forward": (probe_flops(name), seconds),
            "backward": (probe_flops(whole) - probe_flops(name), times[whole] - seconds),
        }
        for passes, (flops, duration) in work.items():
            rate = device.attention_of(dtype, AttentionKind(passes, width, True, tokens))
            if duration > 0:  # noise can make it negative
                shares.setdefault(f"{passes}/{dtype}", []).append(flops / duration / rate)
    return {key: float(np.median(ratios)) for key, ratios in shares.items()}


def _measured_link(
    base: Hardware, level: str, times: dict[str, float], num_ranks: int, *, source: str
) -> Link:
    link: Link = getattr(base, level)
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
        ramp=(),  # a ramp belongs to the table's rate
        source=source,
    )
