"""Application of a tensor-parallel layout: divides parameters, layers, attributes and inputs in place."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atorch_ns.sharding.rank_context import Gather, Region, TensorGroup
from atorch_ns.sharding.tensor.attention import without_fast_path
from atorch_ns.sharding.tensor.divisibility import names_of, parameter_dims
from atorch_ns.sharding.tensor.layers import TRACEABLE, as_divided, attention_by_heads
from atorch_ns.sharding.tensor.narrow_inputs import narrow_inputs
from atorch_ns.sharding.tensor.plan import ROUNDING, Layout, Packing, RegionSpec, common_parent, kind_of
from atorch_ns.sharding.tensor.sequence import StreamSpec, divide_stream, gather_into
from atorch_ns.torch_compat import plain_name


@dataclass
class Divided:
    """The parameters that have been divided.

    Attributes:
        dims: the divided dimension of each parameter, by every name of a tied one.
        packings: the element order of fused parameters, by name.
    """

    dims: dict[str, int] = field(default_factory=dict)
    packings: dict[str, Packing] = field(default_factory=dict)


def divide(
    model: nn.Module,
    layout: Layout,
    group: TensorGroup,
    regions: Iterable[RegionSpec] = (),
    *,
    stream: StreamSpec | None = None,
) -> Divided:
    """Divides the layers of ``model`` in place. Collective if ``group`` has a mesh.

    Every rank keeps its part of the values of the first rank. Parameters on the meta device stay there.
    Tied parameters stay tied.

    Args:
        layout: must have no :func:`misfits`.
        stream: the blocks between which the sequence is divided.
    """
    record = Divided()
    names = names_of(model)
    modules = {plain_name(path): module for path, module in model.named_modules(remove_duplicate=False)}
    parts_made: dict[int, nn.Parameter] = {}  # by id: parts that are plain tensors have no mark
    region_of = _make_regions(modules, regions, group, stream)
    for path, layer in layout.layers.items():
        module = modules[path]
        kind = kind_of(module)
        for name, (dim, parts) in parameter_dims(module, layer).items():
            holder, _, key = f"{path}.{name}".rpartition(".")
            parameter = modules[holder]._parameters.get(key)
            if parameter is None or isinstance(parameter, DTensor) or id(parameter) in parts_made:
                continue  # done under another of its names
            packing = Packing(dim, parts, group.size) if parts else None
            shard = _divide_parameter(parameter, dim, packing, group)
            parts_made[id(shard)] = shard
            _replace_parameter(modules, names[id(parameter)], shard, dim, packing=packing, record=record)
        # An nn.MultiheadAttention is divided by heads; all others have a kind.
        if kind is None:
            attention_by_heads(module, group)
        else:
            as_divided(module, kind, layer.style, group, region=region_of.get(path))
        without_fast_path(modules[path.rpartition(".")[0]])  # the parent's fast path reads whole weights
    for attribute in layout.attributes:
        _divide_attribute(modules, attribute, group.size)
    narrow_inputs(modules, layout, group.size)
    if stream is not None:
        divide_stream(modules, stream, group)
    return record


def divide_parameters(model: nn.Module, dims: Mapping[str, int], group: TensorGroup) -> None:
    """Divides parameters of ``model`` in place, by name, and leaves its layers as they are. Collective.

    Tied parameters stay tied; one that is divided already is left alone.
    """
    names = names_of(model)
    modules = {plain_name(path): module for path, module in model.named_modules(remove_duplicate=False)}
    for name, dim in dims.items():
        holder, _, key = name.rpartition(".")
        parameter = modules[holder]._parameters[key]
        if parameter is not None and not isinstance(parameter, DTensor):
            _replace_parameter(
                modules,
                names[id(parameter)],
                _divide_parameter(parameter, dim, None, group),
                dim,
                packing=None,
                record=Divided(),
            )


def _replace_parameter(
    modules: Mapping[str, nn.Module],
    names: Sequence[str],
    parameter: nn.Parameter,
    dim: int,
    *,
    packing: Packing | None,
    record: Divided,
) -> None:
    for name in names:  # tied parameters stay tied
        holder, _, key = name.rpartition(".")
        modules[holder]._parameters[key] = parameter
        record.dims[name] = dim
        if packing is not None:
            record.packings[name] = packing


@torch.no_grad()
def _divide_parameter(
    parameter: nn.Parameter, dim: int, packing: Packing | None, group: TensorGroup
) -> nn.Parameter:
    whole = parameter.detach()
    if packing is not None:
        whole = packing.pack(whole)
    part: torch.Tensor
    if group.mesh is None:  # simulated ranks, or shapes alone
        part = whole.chunk(group.size, dim)[group.rank].contiguous()
    elif whole.is_meta:
        part = on_meta(whole, dim, group.mesh)
    else:
        part = distribute_tensor(whole, group.mesh, [Shard(dim)])  # collective: values of the first rank
    shard = nn.Parameter(part, requires_grad=parameter.requires_grad)
    shard.__dict__.update(vars(parameter))  # what the user or other methods have noted on it
    return shard


def on_meta(whole: torch.Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """A divided tensor on the meta device."""
    local = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _make_regions(
    modules: Mapping[str, nn.Module],
    specs: Iterable[RegionSpec],
    group: TensorGroup,
    stream: StreamSpec | None,
) -> dict[str, Region]:
    regions: dict[str, Region] = {}
    for spec in specs:
        in_stream = stream is not None and stream.holds(spec.rows[0])
        region = Region(
            group,
            num_rows=len(spec.rows),
            random=spec.random and not in_stream,  # on pieces the block does it: tensor/sequence.py
            sequence_dim=stream.dim if stream is not None and in_stream else None,
            traced=in_stream
            and group.traced
            and stream is not None
            and stream.tight
            and spec.one_input
            and all(kind_of(modules[path]) in TRACEABLE for path in spec.layers),
        )
        if region.random:
            region.watch(modules[common_parent(spec.layers)])
        if stream is not None and in_stream:
            home = common_parent(spec.columns)
            # The input of a block stays in pieces: columns right inside the block gather for themselves.
            if not any(home == block for chain in stream.chains for block in chain):
                gather_into(modules[home], region, group, stream, gather=_own_gather(modules, spec))
        regions.update(dict.fromkeys(spec.layers, region))
    return regions


def _own_gather(modules: Mapping[str, nn.Module], spec: RegionSpec) -> Gather | None:
    # Only the product of these columns can read the result of a gather in fewer bits.
    columns: list[Any] = [modules[path] for path in spec.columns]
    has_one = spec.one_use and all(kind_of(column) is ROUNDING for column in columns)
    return columns[0].gathered if has_one else None


def _divide_attribute(modules: Mapping[str, nn.Module], path: str, degree: int) -> None:
    # The longest prefix that is a module; between it and the attribute stand settings objects.
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        holder: Any = modules.get(".".join(parts[:length]))
        if holder is not None:
            break
    *settings, name = parts[length:]
    # Other modules share the settings object: this one gets a copy.
    for attribute in settings:
        clone = copy.copy(getattr(holder, attribute))
        setattr(holder, attribute, clone)
        holder = clone
    object.__setattr__(holder, name, getattr(holder, name) // degree)  # a dataclass may be frozen
