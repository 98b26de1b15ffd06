"""The blocks of a model that run on parts of the sequence, and which of them are neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from atorch_ns.capture.blocks import NamedModule, repeated_blocks, select_modules
from atorch_ns.data import call_model
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.sharding import study_tail
from atorch_ns.torch_compat import plain_name
from opt_lib._model_axes.tensor import loss_by_numbers


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


@dataclass(frozen=True)
class Tail:
    """What comes after the last block: final norm, head and loss.

    Attributes:
        divides: whether each rank computes it for its own positions.
        parameters: names of the parameters that it uses then.
        note: what was decided and why, for the report.
    """

    divides: bool = False
    parameters: frozenset[str] = frozenset()
    note: str = ""


def divided_tail(
    job: Job,
    sample: Any,
    why_no_sample: str,
    runs: list[list[NamedModule]],
    *,
    dim: int,
    wanted: bool | Literal["auto"],
) -> Tail:
    """Tests on one rank whether head and loss can be computed on each rank's own positions.

    Raises:
        InputError: if the user wants it and it would be wrong.
    """
    wrong, idle, parameters = "", "", frozenset[str]()
    if wanted is False:
        return Tail(note="head and loss see whole samples, since parallel_loss=False")
    assert job.mesh is not None
    if job.parts.stages:
        idle = "the model is cut into stages"
    elif job.mesh.size("tensor") > 1:
        idle = "the axis tensor divides them"
    elif why_no_sample:
        idle = f"{why_no_sample} to test them with"
    else:
        wrong, idle, parameters = _studied(job, sample, runs, dim)
    if wrong and wanted is True:
        raise InputError(
            f'parallel_loss=True cannot be used with {job.original.model_class}: {wrong}. Set it to "auto" or False.'
        )
    if wrong or idle:
        return Tail(note=f"head and loss see whole samples: {wrong or idle}")
    return Tail(True, parameters, "head and loss are computed on each rank's own positions")


def _studied(
    job: Job, sample: Any, runs: list[list[NamedModule]], dim: int
) -> tuple[str, str, frozenset[str]]:
    """Why it would be wrong or of no use, and the names of the parameters that are used."""
    assert job.mesh is not None
    degree, name = job.mesh.size("sequence"), job.original.model_class

    def run(module: nn.Module, data: Any) -> Any:
        return call_model(module, data, job.inputs.model_input_format)

    blocks = [plain_name(block.name) for run_ in runs for block in run_]
    model = job.in_full_precision(job.module)
    study = study_tail(model, sample, run, blocks, degree, dim)
    if study.uses.changed:
        return f"{name} changes hidden states or logits in place, by {study.uses.changed[0]}", "", frozenset()
    if study.failure:
        return "", f"{name} does not run on a part of the positions: {study.failure}", frozenset()
    wrong, idle = loss_by_numbers(job, study, degree)
    parameters = study.parameters
    if parameters is None:  # a mean over ranks leaves unchanged what each computes whole
        inside = names_inside(runs)
        parameters = frozenset({plain_name(name) for name, _ in job.module.named_parameters()} - inside)
    return wrong, idle, parameters
