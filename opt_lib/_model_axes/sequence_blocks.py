"""The blocks of a model that run on parts of the sequence, and which of them are neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from atorch_ns.capture.blocks import NamedModule, repeated_blocks, select_modules
from atorch_ns.data import call_model
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.pipeline import StageModule
from atorch_ns.sharding import BlockChain, Links, study_links, study_tail
from atorch_ns.torch_compat import plain_name
from opt_lib._model_axes.tensor import leave_divided, loss_by_numbers


def block_runs(job: Job, selectors: Sequence[str] | None) -> list[list[NamedModule]]:
    """The blocks, in lists of neighbours in a container and on a stage, which may be called in turn."""
    blocks = _select_blocks(job.module, selectors)
    if not blocks and not job.parts.stages:  # a stage may hold the embedding alone
        raise InputError(
            "sequence_parallel found no block to divide: "
            f"{selectors or 'the repeated blocks'} matches nothing in {job.original.model_class}. In blocks, name the "
            "modules that take and return hidden states."
        )
    runs: list[list[NamedModule]] = []
    for root in job.roots:
        ids = {id(module) for module in root.modules()}  # a run ends where a stage does
        mine = [block for block in blocks if id(block.module) in ids]
        runs += _group_neighbours(job.module, mine)
    return runs


def _select_blocks(model: nn.Module, selectors: Sequence[str] | None) -> list[NamedModule]:
    if selectors is None:
        return repeated_blocks(model)
    return select_modules(model, selectors, outermost=True)


@dataclass(frozen=True)
class WholeModel:
    """The whole model as it was before it was cut or divided.

    Attributes:
        model: its parameters may have no memory; not to be changed.
        blocks: paths of all its blocks.
        sample: two samples; ``None`` where there are none.
        run: calls it as training does.
    """

    model: nn.Module
    blocks: tuple[str, ...]
    sample: Any
    run: Callable[[nn.Module, Any], Any]

    @classmethod
    def of(cls, job: Job, selectors: Sequence[str] | None, sample: Any) -> WholeModel:
        """Returns the model of a job whose layers are whole."""
        model = job.module if job.parts.full_structure is None else job.parts.full_structure
        blocks = tuple(plain_name(block.name) for block in _select_blocks(model, selectors))

        def run(module: nn.Module, data: Any) -> Any:
            return call_model(module, data, job.inputs.model_input_format)

        return cls(job.in_full_precision(model), blocks, sample, run)

    def links(self, dim: int) -> dict[tuple[str, str], Links]:
        """:func:`study_links` of the model."""
        return (
            {}
            if self.sample is None
            else study_links(self.model, self.sample, self.run, self.blocks, dim=dim)
        )

    def outside(self) -> frozenset[str]:
        """The names of the parameters that are in no block."""
        names = (plain_name(name) for name, _ in self.model.named_parameters(remove_duplicate=False))
        inside = tuple(f"{block}." for block in self.blocks)
        return frozenset(name for name in names if not name.startswith(inside))


def _group_neighbours(model: nn.Module, blocks: Sequence[NamedModule]) -> list[list[NamedModule]]:
    runs: list[list[NamedModule]] = []
    for block in blocks:
        if runs and _is_next_sibling(model, runs[-1][-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _is_next_sibling(model: nn.Module, before: NamedModule, block: NamedModule) -> bool:
    parent, _, name = plain_name(block.name).rpartition(".")
    other, _, other_name = plain_name(before.name).rpartition(".")
    if parent != other:
        return False
    container = model.get_submodule(parent)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):  # others may call children in any order
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
    """The part after the last block: final norm, head and loss.

    Attributes:
        divides: whether each rank computes it for its own positions.
        parameters: names of the parameters used in that case.
        note: the decision and its reason, for the report.
    """

    divides: bool = False
    parameters: frozenset[str] = frozenset()
    note: str = ""


def divided_tail(
    job: Job, whole: WholeModel, why_no_sample: str, *, dim: int, request: bool | Literal["auto"]
) -> Tail:
    """Tests on one rank whether head and loss can be computed on each rank's own positions.

    Raises:
        InputError: if the user wants it and it would be wrong.
    """
    wrong, idle, parameters = "", "", frozenset[str]()
    if request is False:
        return Tail(note="head and loss see whole samples, since parallel_loss=False")
    assert job.mesh is not None
    if why_no_sample:
        idle = f"{why_no_sample} to test them with"
    else:
        wrong, idle, parameters = _study_split_loss(job, whole, dim)
    if wrong and request is True:
        raise InputError(
            f'parallel_loss=True cannot be used with {job.original.model_class}: {wrong}. Set it to "auto" or False.'
        )
    if wrong or idle:
        return Tail(note=f"head and loss see whole samples: {wrong or idle}")
    return Tail(True, parameters, "head and loss are computed on each rank's own positions")


def _study_split_loss(job: Job, whole: WholeModel, dim: int) -> tuple[str, str, frozenset[str]]:
    """The reasons why a split loss is wrong or useless, and the names of the parameters used."""
    assert job.mesh is not None
    degree, name = job.mesh.size("sequence"), job.original.model_class
    study = study_tail(whole.model, whole.sample, whole.run, whole.blocks, degree=degree, dim=dim)
    if study.uses.changed:
        return f"{name} changes hidden states or logits in place, by {study.uses.changed[0]}", "", frozenset()
    if study.failure:
        return "", f"{name} does not run on a part of the positions: {study.failure}", frozenset()
    wrong, idle = loss_by_numbers(job, study, degree)
    # A mean over ranks does not change values that each computes whole.
    return wrong, idle, whole.outside() if study.parameters is None else study.parameters


def divide_tail(job: Job, tail: Tail, last: str, chains: Sequence[BlockChain]) -> str:
    """Divides head and loss on the ranks that compute them. Collective.

    Args:
        last: the path of the model's last block.
        chains: this rank's blocks.

    Returns:
        A note for the report.
    """
    stages = job.parts.stages
    mine = bool(chains) and plain_name(chains[-1].blocks[-1].name) == last  # this rank has the last block
    if stages:
        ends = isinstance(stages[-1], StageModule) and stages[-1].is_last
        # Head and loss are in the last stage, and the last block must be there too.
        has_tail = ends and mine and chains[-1].blocks[-1].module in set(stages[-1].modules())
        if not any(job.cluster.gathered(has_tail)):
            return "head and loss see whole samples: the model is cut between them and the last block"
        mine = has_tail
    if mine:
        chains[-1].divide_tail(job.module)
        leave_divided(job)
    return tail.note
