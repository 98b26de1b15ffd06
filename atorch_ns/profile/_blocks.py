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
    children are of one class and have parameters. All its children of that class are blocks. Classes that hold
    modules go before those that do not, and layers of torch (``nn.Linear``) come last, however many there are: the
    layers before and after blocks are not what the model repeats. Containers
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
    ranks: dict[type[nn.Module], int] = {}
    for child in container.children():
        if is_stand_in(child) or any(True for _ in child.parameters()):
            block = unwrap_checkpoint(pipeline_unit(stood_for(child))[1])
            counts[type(block)] = counts.get(type(block), 0) + 1
            ranks[type(block)] = max(ranks.get(type(block), 0), _rank(block))
    repeated = [kind for kind, count in counts.items() if count >= 2]
    return max(repeated, key=lambda kind: (ranks[kind], counts[kind]), default=None)


def _rank(block: nn.Module) -> int:
    """How likely a module is a block rather than a layer: 2 with modules inside, 1 without, 0 for torch's layers."""
    if any(name != "parametrizations" for name, _ in block.named_children()):
        return 2
    return 0 if any(kind.__module__.startswith("torch.nn.modules.") for kind in _bases(block)) else 1


def _bases(module: nn.Module) -> list[type]:
    """Its class and those it inherits from, without ``nn.Module`` itself."""
    return [kind for kind in type(module).__mro__ if kind is not nn.Module]
