"""A small model of the same structure as the user's, with values, for the numerics probe."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from atorch_ns.job import Materialiser
from atorch_ns.profile import repeated_blocks
from atorch_ns.profile._fingerprint import fingerprints
from atorch_ns.profile._structure import copy_structure
from atorch_ns.profile._truncate import Truncation, truncate

__all__ = ["bytes_needed", "fill", "round_to", "structure_of"]

_CONSTANT_NOISE = 0.02
"""Standard deviation of what is added to parameters whose values are all alike (see :func:`fill`)."""

Originals = Mapping[nn.Parameter, nn.Parameter]


def structure_of(model: nn.Module, *, shallow: bool) -> tuple[nn.Module, Originals]:
    """A copy of ``model`` whose parameters take no memory; ties, buffers and settings are as they were.

    Args:
        model: read, not changed.
        shallow: keep two blocks of the first kind and one of each other kind.

    Returns:
        The copy with its parameters on meta, and for each of them the one that it stands for.
    """
    blocks = {block.name: block.module for block in repeated_blocks(model)} if shallow else {}
    shortened = truncate(model, blocks, fingerprints(blocks))

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta") if kind == "parameter" else tensor.detach().clone()

    copied = copy_structure(model, make, shortened.containers)
    named = dict(model.named_parameters(remove_duplicate=False))
    originals = {}
    for path, module in copied.named_modules():
        source = _original_path(path, shortened)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                originals[parameter] = named[f"{source}.{name}" if source else name]
    return copied, originals


def _original_path(path: str, shortened: Truncation) -> str:
    """The path, in the whole model, of a module of the shallow one."""
    for container in shortened.containers.values():
        for place, index in enumerate(container.kept):
            copied = container.copy_path(place)
            if path == copied or path.startswith(f"{copied}."):
                return container.blocks[index] + path.removeprefix(copied)
    return path


def bytes_needed(model: nn.Module) -> int:
    """Bytes of one copy of the parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def fill(model: nn.Module, originals: Originals, device: torch.device, *, seed: int) -> None:
    """Gives every parameter on meta its value, in place.

    A parameter that has a value keeps it. One that was on meta itself is initialised as the model would, or
    with small random values where the model offers no way. A constant parameter (zeros, ones) gets a little
    noise: behind a layer of zeros all gradients are zero, and a lost one would not be missed.

    Raises:
        InputError: if a buffer on meta cannot be given a value.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            original = None if parameter is None else originals.get(parameter)
            if parameter is None or original is None or original.is_meta:
                continue
            if parameter not in copies:
                data = original.detach().to(device, copy=True)
                copies[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = copies[parameter]
    Materialiser(model, device, seed=seed, init=_initialiser(model)).materialise([model])
    model.to(device)
    for name, parameter in model.named_parameters():
        _unsettle(name, parameter)


@torch.no_grad()
def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters values that ``dtype`` can hold, so that a strategy that casts them starts from the same."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.copy_(parameter.to(dtype))


def _initialiser(model: nn.Module) -> Callable[[nn.Module], object]:
    """What the model offers, and small random values for whatever that leaves unset."""
    from_model = getattr(model, "_init_weights", None)

    @torch.no_grad()
    def init(module: nn.Module) -> None:
        own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        try:
            if callable(from_model):
                from_model(module)
            elif callable(own):
                own()
        except Exception:
            pass  # any initialisation will do: the probe compares two runs from the same values
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and bool(torch.isnan(parameter).any()):
                parameter.normal_(std=_CONSTANT_NOISE)

    return init


@torch.no_grad()
def _unsettle(name: str, parameter: nn.Parameter) -> None:
    if parameter.numel() < 2 or not parameter.is_floating_point() or not parameter.requires_grad:
        return
    if bool(parameter.amin() != parameter.amax()):
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(parameter.shape, generator=generator) * _CONSTANT_NOISE
    parameter.add_(noise.to(parameter))
