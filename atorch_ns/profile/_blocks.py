"""The repeated blocks of a model, found by structure."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from atorch_ns.torch_compat import is_stand_in, pipeline_unit, stood_for, unwrap_checkpoint

__all__ = ["NamedModule", "repeated_blocks"]


class NamedModule(NamedTuple):
    """A module and its dotted path from the root."""

    name: str
    module: nn.Module


def repeated_blocks(model: nn.Module) -> list[NamedModule]:
    """The outermost modules that the model repeats: the layers of a transformer, of a deep MLP.

    A container (``ModuleList``, ``Sequential``, ``ModuleDict``) repeats a block when at least two of its
    children are of one class and have parameters. All its children of that class are blocks. Containers
    inside a block are not looked into; several containers (encoder and decoder) each give their blocks. Blocks
    that other ranks of a pipeline hold count, and are not among those returned.

    Returns:
        The blocks in the order of the model's modules; empty if nothing repeats.
    """
    found: list[NamedModule] = []
    _collect(model, "", found)
    return found


def _collect(module: nn.Module, prefix: str, found: list[NamedModule]) -> None:
    repeated = _repeated_class(module)
    for name, child in module.named_children():
        if is_stand_in(child):
            continue
        inner, child = pipeline_unit(child)
        path = f"{prefix}{name}{inner}"
        if repeated is not None and type(unwrap_checkpoint(child)) is repeated:
            found.append(NamedModule(path, child))
        else:
            _collect(child, f"{path}.", found)


def _repeated_class(container: nn.Module) -> type[nn.Module] | None:
    if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return None
    counts: dict[type[nn.Module], int] = {}
    for child in container.children():
        if is_stand_in(child) or any(True for _ in child.parameters()):
            kind = type(unwrap_checkpoint(pipeline_unit(stood_for(child))[1]))
            counts[kind] = counts.get(kind, 0) + 1
    kind, count = max(counts.items(), key=lambda item: item[1], default=(nn.Module, 0))
    return kind if count >= 2 else None
