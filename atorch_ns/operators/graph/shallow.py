"""Shallow capture: the operators of a model of which blocks that are alike are left out, at a cost that depth does not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import fingerprints, repeated_blocks
from atorch_ns.capture.structure import Container, truncate
from atorch_ns.operators.graph.capture import capture, flat_arguments
from atorch_ns.operators.graph.graph import OperatorGraph


@dataclass(frozen=True, eq=False)
class Shallow:
    """The graph of a shallow copy of a model.

    Attributes:
        graph: its operators; each block knows how many of the model it stands for.
        containers: the lists of blocks that were shortened.
        inputs: the tensors among the arguments.
    """

    graph: OperatorGraph
    containers: Mapping[str, Container]
    inputs: Sequence[torch.Tensor]

    def copy_name(self, name: str) -> str:
        """What stands in the copy for a parameter or module of the model."""
        for path, container in self.containers.items():
            for block, place in zip(container.blocks, container.stands_for, strict=True):
                if name == block or name.startswith(f"{block}."):
                    return container.copy_path(place) + name.removeprefix(block)
            assert not name.startswith(f"{path}.") or path == "", name
        return name


def capture_shallow(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device,
    units: Collection[str] | None = None,
) -> Shallow:
    """Captures the first block, the last, and one of each kind in between of every list of blocks.

    Args:
        units: paths of modules that are divided each by itself; ``None`` if the model is divided as one.

    Raises:
        InputError: as :func:`~atorch_ns.operators.graph.capture.capture` does.
    """
    found = {block.name: block.module for block in repeated_blocks(model)}
    blocks = {path: module for path, module in found.items() if units is None or path in units}
    containers = truncate(model, blocks, fingerprints(blocks))
    with torch.enable_grad():
        captured = capture(model, args, kwargs, containers=containers, dtypes=dtypes, device=device)
    paths: dict[str, int] = {}
    for path in blocks:
        container = containers.get(path.rpartition(".")[0])
        if container is None:
            paths[path] = 1
        else:
            places = Counter(container.stands_for)
            paths.update((container.copy_path(place), places[place]) for place in range(len(container.kept)))
    tensors, _ = flat_arguments(args, kwargs)
    single = None if units is None else [path for path in units if path not in blocks]
    return Shallow(OperatorGraph(captured, tuple(paths), paths, units=single), containers, tensors)
