"""Dividing a model's layers as a layout says."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atorch_ns.sharding._packing import Packing
from atorch_ns.sharding._tensor_attention import without_fast_path
from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.sharding._tensor_layers import as_divided, attention_by_heads
from atorch_ns.sharding._tensor_misfits import names_of, parameter_dims
from atorch_ns.sharding._tensor_narrow import narrow_inputs
from atorch_ns.sharding._tensor_plan import Layout
from atorch_ns.sharding._tensor_region import Division, Region
from atorch_ns.sharding._tensor_sequence import StreamSpec, divide_stream, gather_into
from atorch_ns.torch_compat import plain_name

__all__ = ["Divided", "RegionSpec", "common_parent", "divide"]


@dataclass(frozen=True)
class RegionSpec:
    """Layers between which ranks hold different features.

    Attributes:
        columns: paths of the layers that begin it.
        rows: paths of those that end it.
        random: whether random numbers are drawn between them.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    random: bool = True


@dataclass
class Divided:
    """What has been divided.

    Attributes:
        names: of the parameters, all names of tied ones.
        packings: the order of fused ones, by name.
    """

    names: list[str] = field(default_factory=list)
    packings: dict[str, Packing] = field(default_factory=dict)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by path, those inside wrappers rather than the wrappers."""
    return {plain_name(path): module for path, module in model.named_modules(remove_duplicate=False)}


def divide(
    model: nn.Module,
    layout: Layout,
    division: Division,
    regions: Iterable[RegionSpec] = (),
    stream: StreamSpec | None = None,
) -> Divided:
    """Divides the layers of ``model`` in place; collective where ``division`` has a mesh.

    Every rank keeps its part of the values of the first rank. Parameters on the meta device stay there.
    Tied parameters stay tied.

    Args:
        model: whole.
        layout: must have no :func:`misfits`.
        division: this rank's place.
        regions: the stretches between its layers.
        stream: the blocks between which the sequence is divided.
    """
    done = Divided()
    names = names_of(model)
    modules = _modules(model)
    parts_made: dict[int, nn.Parameter] = {}
    region_of = _regions(modules, regions, division, stream)
    for path, layer in layout.layers.items():
        module = modules[path]
        kind = kind_of(module)
        for name, (dim, parts) in parameter_dims(module, layer).items():
            holder, _, own = f"{path}.{name}".rpartition(".")
            parameter = modules[holder]._parameters.get(own)
            if parameter is None or isinstance(parameter, DTensor) or id(parameter) in parts_made:
                continue  # done under another of its names
            packing = Packing(dim, parts, division.degree) if parts else None
            made = _part(parameter, dim, packing, division)
            parts_made[id(made)] = made
            _put(modules, names[id(parameter)], made, packing, done)
        if kind is None:
            attention_by_heads(module, division)
        else:
            as_divided(module, kind, layer.style, division, region_of.get(path))
        without_fast_path(modules[path.rpartition(".")[0]])
    for attribute in layout.attributes:
        _divide_attribute(modules, attribute, division.degree)
    narrow_inputs(modules, layout, division.degree)
    if stream is not None:
        divide_stream(modules, stream, division)
    return done


def _put(
    modules: Mapping[str, nn.Module],
    names: Sequence[str],
    made: nn.Parameter,
    packing: Packing | None,
    done: Divided,
) -> None:
    """Puts a divided parameter in the place of the whole one, under all its names."""
    for name in names:
        holder, _, own = name.rpartition(".")
        modules[holder]._parameters[own] = made
        done.names.append(name)
        if packing is not None:
            done.packings[name] = packing


@torch.no_grad()
def _part(parameter: nn.Parameter, dim: int, packing: Packing | None, division: Division) -> nn.Parameter:
    whole = parameter.detach()
    if packing is not None:
        whole = packing.pack(whole)
    part: torch.Tensor
    if division.mesh is None:
        part = whole.chunk(division.degree, dim)[division.rank].contiguous()
    elif whole.is_meta:
        part = on_meta(whole, dim, division.mesh)
    else:
        part = distribute_tensor(whole, division.mesh, [Shard(dim)])
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    made.__dict__.update(vars(parameter))
    return made


def on_meta(whole: torch.Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """A divided tensor without memory."""
    local = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _regions(
    modules: Mapping[str, nn.Module],
    specs: Iterable[RegionSpec],
    division: Division,
    stream: StreamSpec | None,
) -> dict[str, Region]:
    found: dict[str, Region] = {}
    for spec in specs:
        paths = (*spec.columns, *spec.rows)
        divided = stream is not None and stream.holds(spec.rows[0])
        region = Region(
            division,
            num_rows=len(spec.rows),
            random=spec.random and not divided,
            sequence_dim=stream.dim if stream is not None and divided else None,
        )
        if region.random:
            region.watch(modules[common_parent(paths)])
        if stream is not None and divided:
            home = common_parent(spec.columns)
            if not any(home == block for chain in stream.chains for block in chain):
                gather_into(modules[home], region, division, stream)
        found.update(dict.fromkeys(paths, region))
    return found


def common_parent(paths: Sequence[str]) -> str:
    """The path of the innermost module that holds all of them."""
    parents = [path.split(".")[:-1] for path in paths]
    shared = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _divide_attribute(modules: Mapping[str, nn.Module], path: str, degree: int) -> None:
    """Divides one number; an object of settings that others share is copied first."""
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        holder: Any = modules.get(".".join(parts[:length]))
        if holder is not None:
            break
    *settings, name = parts[length:]
    for attribute in settings:
        own = copy.copy(getattr(holder, attribute))
        setattr(holder, attribute, own)
        holder = own
    object.__setattr__(holder, name, getattr(holder, name) // degree)
