"""Self-tests: does a module divided by a layout compute what it computes whole?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.profile._batches import map_batch
from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.sharding._tensor_apply import Divided, RegionSpec, divide
from atorch_ns.sharding._tensor_plan import Layout
from atorch_ns.sharding._tensor_region import Division
from atorch_ns.sharding._tensor_sequence import StreamSpec
from atorch_ns.sharding._tensor_units import Unit

__all__ = ["TOLERANCE", "Tested", "fits", "runs_without_memory", "self_test"]

TOLERANCE = 1e-3
"""The largest error that counts as rounding, in units of the largest value of the tensor compared. In fp32 a
right layout shows about 1e-6; a head too few or a wrong order of parts shows about 1."""

_FLOOR = 1e-2
"""Gradients smaller than this share of the largest are compared on its scale: that of attention's key bias is zero
but for rounding."""


@dataclass(frozen=True)
class Tested:
    """What a self-test found.

    Attributes:
        error: the largest error of an output or a gradient, relative to the largest value there.
        where: what showed it.
        partial: names of whole parameters of which each rank has only a summand of the gradient.
    """

    error: float
    where: str
    partial: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the error is rounding."""
        return self.error <= TOLERANCE


def fits(
    unit: Unit,
    layout: Layout,
    regions: Iterable[RegionSpec],
    degree: int,
    stream: StreamSpec | None = None,
    *,
    training: bool = False,
) -> str | None:
    """Whether the divided unit runs and gives outputs of the right shapes, without memory; why not, or ``None``.

    Args:
        unit: the unit.
        layout: of its paths.
        regions: the stretches between its layers; no random numbers can be drawn inside them if ``training``.
        degree: ranks.
        stream: the blocks between which the sequence is divided.
        training: whether it must run in training as well as in evaluation.
    """
    try:
        with unit.without_memory() as (whole, args, kwargs):
            wanted = [tensor.shape for tensor in tensors_in(whole(*args, **kwargs))]
            divide(whole, layout, Division(None, degree=degree), regions, stream)
            found = [tensor.shape for tensor in tensors_in(whole(*args, **kwargs))]
            if training:
                whole.train()(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if wanted == found else f"it gives {found} in place of {wanted}"


def runs_without_memory(unit: Unit) -> bool:
    """Whether the undivided unit runs on fake tensors; code that looks at values, as at a router's, does not."""
    try:
        with unit.without_memory() as (whole, args, kwargs):
            whole(*args, **kwargs)
    except Exception:  # whatever its code raises
        return False
    return True


def self_test(
    unit: Unit,
    layout: Layout,
    regions: Iterable[RegionSpec],
    division: Division,
    stream: StreamSpec | None = None,
) -> Tested:
    """Compares outputs and all gradients of the unit, divided and whole, on random inputs; collective."""
    assert division.mesh is not None
    device = division.mesh.device_type
    reference = _run(*unit.with_values(device))
    module, args, kwargs = unit.with_values(device)
    specs = [RegionSpec(spec.columns, spec.rows, random=False) for spec in regions]
    done = divide(module, layout, division, specs, stream)
    found = _run(module, args, kwargs)
    errors = {
        f"output {place}": _error(mine, whole)
        for place, (mine, whole) in enumerate(zip(found.outputs, reference.outputs, strict=True))
    }
    floor = _FLOOR * max((_largest(t) for t in reference.inputs), default=0.0)
    errors |= {
        f"the gradient of input {place}": _error(mine, whole, floor=floor)
        for place, (mine, whole) in enumerate(zip(found.inputs, reference.inputs, strict=True))
    }
    partial = _compare_parameters(found, reference, done, division, errors)
    return _worst(errors, partial, division)


@dataclass(frozen=True)
class _Run:
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    inputs: list[torch.Tensor] = []
    given: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:  # as in the model: masks and rotary tables get no gradients
            return tensor
        if id(tensor) not in given:
            inputs.append(tensor)
            given[id(tensor)] = tensor.clone()  # operators in place may not change a leaf
        return given[id(tensor)]

    args, kwargs = map_batch(leaf, args), map_batch(leaf, kwargs)
    with torch.enable_grad():
        outputs = [tensor for tensor in tensors_in(module(*args, **kwargs)) if tensor.is_floating_point()]
        generator = torch.Generator().manual_seed(11)
        loss = sum(
            (output * torch.randn(output.shape, generator=generator).to(output)).sum() for output in outputs
        )
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
    return _Run(
        [output.detach() for output in outputs],
        [_grad(tensor) for tensor in inputs],
        {name: _grad(parameter) for name, parameter in module.named_parameters()},
    )


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        return torch.zeros_like(tensor.detach())
    return tensor.grad.detach()


def _compare_parameters(
    found: _Run, reference: _Run, done: Divided, division: Division, errors: dict[str, float]
) -> tuple[str, ...]:
    """Adds the errors of all parameters' gradients; the names of those whose sum over ranks is the right one."""
    partial = []
    floor = _FLOOR * max((_largest(whole) for whole in reference.parameters.values()), default=0.0)
    for name, whole in reference.parameters.items():
        mine, what = found.parameters[name], f"the gradient of {name}"
        if isinstance(mine, DTensor):
            (placement,) = mine.placements
            packing = done.packings.get(name)
            wanted = whole if packing is None else packing.pack(whole)
            part = wanted.chunk(division.degree, placement.dim)[division.rank]  # type: ignore[attr-defined]
            errors[what] = _error(mine.to_local(), part, floor=max(floor, _largest(whole)))
            continue
        total = mine.clone()
        dist.all_reduce(total, group=division.group)
        pair = [_error(mine, whole), _error(total, whole)]
        floored = [_error(mine, whole, floor=floor), _error(total, whole, floor=floor)]
        alone, summed, *both = _everywhere([*pair, *floored], division)
        if summed < alone:
            partial.append(name)
        errors[what] = both[summed < alone]
    return tuple(partial)


def _everywhere(errors: list[float], division: Division) -> list[float]:
    """The largest on any rank."""
    assert division.mesh is not None
    values = torch.tensor(errors, dtype=torch.float64, device=division.mesh.device_type)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=division.group)
    return [float(value) for value in values]


def _worst(errors: dict[str, float], partial: tuple[str, ...], division: Division) -> Tested:
    values = _everywhere(list(errors.values()), division)
    error, where = max(zip(values, errors, strict=True), default=(0.0, ""))
    return Tested(error, where, partial)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _error(mine: torch.Tensor, whole: torch.Tensor, *, floor: float = 0.0) -> float:
    """max|mine - whole| / max(max|whole|, floor); 1e9 for what is not finite or of another shape."""
    if mine.shape != whole.shape:
        return 1e9
    if not whole.numel():
        return 0.0
    error = _largest(mine - whole) / max(_largest(whole), floor, 1e-30)
    return error if error < 1e9 else 1e9
