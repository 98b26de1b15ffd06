"""Measured clusters: the file of ``atorch-ns calibrate``, its comparison with the table, its use in a job.

The file is a cluster specification with every figure (:mod:`~atorch_ns.cluster.spec`). Its key ``measured``
has the time, the machine, and the seconds of each probe, from which the figures come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from atorch_ns.cluster.calibrate import Measurement
from atorch_ns.cluster.cluster import Cluster, cpu_device
from atorch_ns.cluster.hardware import Device, Hardware, Link
from atorch_ns.cluster.kernels import AttentionKind
from atorch_ns.cluster.spec import cluster_from_spec, read_spec
from atorch_ns.cluster.speed_probes import messages_of, probe_flops
from atorch_ns.errors import InputError
from atorch_ns.system import cpu_model, write_whole

LEVELS: Final[Mapping[str, str]] = {"within_node": "within a node", "between_nodes": "between nodes"}
"""The levels of links, in words."""

_HEADER: Final = """\
# Speeds of a cluster, by atorch-ns calibrate. For its jobs: auto_accelerate(search_calibration="{name}").
# To plan for it: atorch-ns plan --cluster {name}, atorch_ns.planning.plan(cluster="{name}").
# For more nodes, change nodes and name the link: between_nodes: ib400.
"""


def machine_name(cluster: Cluster) -> str:
    """The driver's name of the device, or the CPU model. Figures are valid only for this device."""
    return cluster.device_name if cluster.device_type == "cuda" else cpu_model()


def measured_document(cluster: Cluster, figures: Measurement) -> dict[str, Any]:
    """The file's content: all fields of the device and of the links, as measured or as in the table."""
    hardware = figures.hardware
    between = {"between_nodes": _link_fields(hardware.between_nodes)} if cluster.num_nodes > 1 else {}
    return {
        "devices_per_node": cluster.local_world_size,
        "nodes": cluster.num_nodes,
        "device": _device_fields(hardware.device),
        "within_node": _link_fields(hardware.within_node),
        **between,
        "to_host": _link_fields(hardware.to_host),
        "measured": {
            "machine": machine_name(cluster),
            "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "torch": str(cluster.torch),  # torch has a type of its own for it
            "seconds": dict(figures.seconds),
        },
    }


def _device_fields(device: Device) -> dict[str, Any]:
    plain = _dump_fields(device)
    usual = {field.name: field.default for field in fields(Device) if field.default is not MISSING}
    special = {name: v for name, v in plain.items() if getattr(device, name) != usual.get(name, MISSING)}
    return {("memory" if name == "memory_bytes" else name): value for name, value in special.items()}


def _link_fields(link: Link) -> dict[str, Any]:
    plain = _dump_fields(link)
    return {"name": plain.pop("name"), **plain.pop("rate"), **plain}


def _dump_fields(value: Device | Link) -> dict[str, Any]:
    from pydantic import TypeAdapter

    plain: dict[str, Any] = TypeAdapter[Any](type(value)).dump_python(value, mode="json")
    return plain


def write_measured(path: Path, document: Mapping[str, Any]) -> None:
    """Writes the file in one step, as JSON or YAML by its suffix.

    Raises:
        InputError: if the file cannot be written. An existing file is left unchanged.
    """
    try:
        write_whole(path, _as_json(document) if path.suffix == ".json" else _as_yaml(document, path.name))
    except OSError as error:
        raise InputError(f"{path} was not written: {error.strerror or error}.") from error


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _as_yaml(document: Mapping[str, Any], name: str) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """With floats as ``_format_float`` writes them."""

    Dumper.add_representer(
        float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _format_float(value))
    )
    figures = {key: value for key, value in document.items() if key != "measured"}
    # None puts innermost mappings (rates) on one line; False gives each of the seconds its own.
    parts = [
        yaml.dump(
            part, Dumper=Dumper, sort_keys=False, width=160, allow_unicode=True, default_flow_style=flow
        )
        for part, flow in ((figures, None), ({"measured": document["measured"]}, False))
    ]
    return _HEADER.format(name=name) + "".join(parts)


def _format_float(value: float) -> str:
    text = f"{value:.4g}" if float(f"{value:.4g}") == value else repr(value)
    # YAML 1.1 reads 3e+10 as text, and 3.0e+10 as a number.
    digits, exponent, power = text.partition("e")
    return f"{digits if '.' in digits else f'{digits}.0'}{exponent}{power}"


def holds_something_else(path: Path) -> bool:
    """Returns whether the file exists but was not written by a calibration."""
    if not path.exists():
        return False
    try:
        return "measured" not in read_spec(path, [])
    except InputError:
        return True


def measured_for(path: Path, cluster: Cluster) -> Hardware:
    """The figures of the file, for a job on the cluster where they were measured.

    Raises:
        InputError: if the file cannot be read, or was measured on something else.
    """
    there = cluster_from_spec(path)
    hardware = there.hardware
    assert hardware is not None
    section = read_spec(path, []).get("measured")
    machine = section.get("machine") if isinstance(section, Mapping) else None
    problems = list(_hardware_differences(there, machine, cluster))
    if problems:
        raise InputError(
            f"the figures in {path} are not from this job's cluster: {'; '.join(problems)}. Measure here, with the launcher "
            f"and the processes of the job: atorch-ns calibrate -o {path.name}; or omit search_calibration."
        )
    on_cpu = cluster.device_type == "cpu"
    memory = cpu_device(cluster.local_world_size).memory_bytes if on_cpu else cluster.device_memory_bytes
    return replace(hardware, device=replace(hardware.device, memory_bytes=memory))


def _hardware_differences(there: Cluster, machine: str | None, here: Cluster) -> Iterator[str]:
    name = machine_name(here)
    if machine != name or there.device_type != here.device_type:
        yield f"they are of {there.device_type} {machine}, and this job has {here.device_type} {name}"
    elif here.device_type == "cpu" and there.local_world_size != here.local_world_size:
        yield (
            f"{there.local_world_size} processes shared each machine's cores, and here {here.local_world_size} do"
        )
    if here.num_nodes > 1 and there.num_nodes == 1:
        yield f"they are of one node, and this job has {here.num_nodes}"


class Comparison(NamedTuple):
    """A measured figure beside the table's.

    Attributes:
        figure: the name of the measured figure.
        unit: ``"FLOP/s"``, ``"B/s"``, ``"s"``, or nothing for a share.
        measured: in that unit.
        table: the table's value in that unit; ``None`` if it has none.
    """

    figure: str
    unit: str
    measured: float
    table: float | None

    @property
    def share(self) -> float | None:
        """The ratio of measured speed to the table's; ``None`` without a table value."""
        if not self.table or not self.measured:
            return None
        return self.table / self.measured if self.unit == "s" else self.measured / self.table


def comparisons(figures: Measurement) -> Iterator[Comparison]:
    """Compares every figure of the device, then of each link."""
    table = figures.table
    yield from _of_device(figures.hardware.device, None if table is None else table.device, figures.seconds)
    for level, num_ranks in figures.sizes.items():
        reference = None if table is None else getattr(table, level)
        yield from _of_link(
            level, getattr(figures.hardware, level), reference, figures.seconds, num_ranks=num_ranks
        )


def _of_device(device: Device, table: Device | None, seconds: Mapping[str, float]) -> Iterator[Comparison]:
    rates = {} if table is None else {
        dtype: table.products_of(dtype) for dtype in device.flops_per_s
    }  # fmt: skip
    dtypes = {name.split("/")[1] for name in seconds if name.startswith("product/")}
    for dtype in (name for name in device.flops_per_s if name in dtypes):
        yield Comparison(f"products, {dtype}", "FLOP/s", device.flops_per_s[dtype], rates.get(dtype))
    for name, value in seconds.items():
        what, *rest = name.split("/")
        if what in _BY_SIZE:
            size = _BY_SIZE[what].format(dtype=rest[0], shape=rest[1].replace("x", " × "))
            reference = rates.get(rest[0])
            if what != "square" and table is not None:
                reference = _attention_rate(table, what, *rest)
            yield Comparison(size, "FLOP/s", probe_flops(name) / value, reference)
    bandwidth = None if table is None else table.memory_bytes_per_s
    in_place = None if table is None else table.update_bytes_per_s
    yield Comparison("element-wise operators, new results", "B/s", device.memory_bytes_per_s, bandwidth)
    yield Comparison("element-wise operators, in place", "B/s", device.update_bytes_per_s, in_place)
    yield Comparison("start of an operator", "s", device.launch_s, None if table is None else table.launch_s)


def _attention_rate(table: Device, what: str, dtype: str, shape: str) -> float:
    *_, tokens, width = map(int, shape.split("x"))
    forward, backward = (
        table.attention_of(dtype, AttentionKind(passes, width, True, tokens))
        for passes in ("forward", "backward")
    )
    # The backward pass has 2.5 times the operations of the forward pass; the times of both add up.
    return forward if what == "attention" else 3.5 / (1 / forward + 2.5 / backward)


_BY_SIZE: Final[Mapping[str, str]] = {
    "square": "product, {dtype}, {shape}",
    "attention": "causal attention forward, {dtype}, {shape}",
    "attention_training": "causal attention forward and backward, {dtype}, {shape}",
}


def _of_link(
    level: str, link: Link, table: Link | None, seconds: Mapping[str, float], *, num_ranks: int
) -> Iterator[Comparison]:
    for name, value in seconds.items():
        of_level, _, rest = name.partition("/")
        collective, _, size = rest.partition("/")
        if of_level != level or not size.isdecimal():
            continue
        reference = None
        if table is not None:
            rate, (messages, parts) = table.rate_of(collective), messages_of(collective, num_ranks)
            reference = messages * (rate.latency_s + int(size) / parts / rate.bytes_per_s)
        size_text = f"{int(size) // 2**10} KiB" if int(size) < 2**20 else f"{int(size) // 2**20} MiB"
        yield Comparison(f"{collective} {LEVELS[level]}, {size_text}", "s", value, reference)
    yield Comparison(
        f"overlap with computation {LEVELS[level]}",
        "",
        link.overlap,
        None if table is None else table.overlap,
    )
