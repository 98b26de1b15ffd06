"""The blocks of a model that run on parts of the sequence, and which of them are neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from atorch_ns.capture.blocks import NamedModule, repeated_blocks, select_modules
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.torch_compat import plain_name


def block_runs(job: Job, selectors: Sequence[str] | None) -> list[list[NamedModule]]:
    """The blocks, in lists of those that may be called one after another: neighbours in a container and on a stage."""
    if selectors is None:
        blocks = repeated_blocks(job.module)
    else:
        blocks = select_modules(job.module, selectors, outermost=True)
    if not blocks and not job.parts.stages:  # a stage may hold the embedding alone
        raise InputError(
            "sequence_parallel found no block to divide: "
            f"{selectors or 'the repeated blocks'} matches nothing in {job.original.model_class}. Name in blocks the "
            "modules that take and return hidden states."
        )
    runs: list[list[NamedModule]] = []
    for root in job.roots:
        held = {id(module) for module in root.modules()}
        mine = [block for block in blocks if id(block.module) in held]
        runs += _neighbours(job.module, mine)
    return runs


def _neighbours(model: nn.Module, blocks: Sequence[NamedModule]) -> list[list[NamedModule]]:
    """Blocks in maximal runs of children that stand next to each other."""
    runs: list[list[NamedModule]] = []
    for block in blocks:
        if runs and _follows(model, runs[-1][-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _follows(model: nn.Module, before: NamedModule, block: NamedModule) -> bool:
    parent, _, name = plain_name(block.name).rpartition(".")
    other, _, other_name = plain_name(before.name).rpartition(".")
    if parent != other:
        return False
    container = model.get_submodule(parent)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return False
    names = list(container._modules)
    return names.index(name) == names.index(other_name) + 1


def names_inside(runs: list[list[NamedModule]]) -> set[str]:
    """The parameters whose gradient is the mean over the ranks."""
    return {
        plain_name(f"{block.name}.{name}")
        for blocks in runs
        for block in blocks
        for name, _ in block.module.named_parameters(remove_duplicate=False)
    }
