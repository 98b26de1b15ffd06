"""Study of code around blocks: whether it leaves hidden states alone or treats positions alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.nests import map_leaves, resized_batch, samples_and_tokens
from atorch_ns.errors import InputError
from atorch_ns.profile.record.steps import TracedModel
from atorch_ns.sharding.sequence.find_chains import Links, find_links
from atorch_ns.sharding.sequence.plan import SequenceLayout, find_hidden
from atorch_ns.sharding.sequence.tokens import DividedTokens, TokenPart
from atorch_ns.sharding.tensor.trace import ways_to_run
from atorch_ns.sharding.vocabulary.outputs import LossStudy, Run
from atorch_ns.text import error_line
from atorch_ns.torch_compat import plain_name


def study_tail(
    model: nn.Module, batch: Any, run: Run, blocks: Sequence[str], *, degree: int, dim: int
) -> LossStudy:
    """Runs a copy of the model with divided hidden states after its last block, without memory if possible.

    Args:
        model: the whole model; not changed.
        blocks: paths of the blocks that run on parts, the last one last.
        degree: the number of ranks that samples are divided over.
        dim: the hidden states' dimension of positions.
    """
    sizes = samples_and_tokens(batch)
    subject = TracedModel(model, batch, run, sizes, sizes)
    study = LossStudy(replays=False)
    for prepare, at in ways_to_run(sizes, degree):
        study = LossStudy(batch=resized_batch(batch, sizes, at), replays=False)
        try:
            with prepare(subject, at) as (copy, small), torch.enable_grad():
                _divide_after(copy, blocks, degree, dim, study=study)
                study.output = run(copy.train(), small)
                study.parameters = _used_parameter_names(copy, study)
            return study
        except Exception as error:
            study.failure = error_line(error)
            if study.uses.changed:  # every other way to run refuses in-place changes too
                return study
    return study


def _divide_after(
    model: nn.Module, blocks: Sequence[str], degree: int, dim: int, *, study: LossStudy
) -> None:
    calls: list[str] = []

    def leaving(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            # After the last block hidden states are in parts: no block may take them.
            if blocks[-1] in calls:
                raise InputError(f"{path} is called after {blocks[-1]}")
            calls.append(path)
            hidden = find_hidden(output, dim)
            if path != blocks[-1]:
                return None
            if hidden is None:
                raise InputError(f"{path} returns no hidden states")
            length = hidden[1].size(dim)
            at = TokenPart(SequenceLayout(length, degree, 0), None, dim, length=length)  # shapes alone
            part = at.select(hidden[1], dim, ())
            return map_leaves(
                lambda key, leaf: DividedTokens.of(part, at, study.uses) if key == hidden[0] else leaf, output
            )

        return hook

    for path in blocks:
        model.get_submodule(path).register_forward_hook(leaving(path))


def _used_parameter_names(model: nn.Module, study: LossStudy) -> frozenset[str] | None:
    ids = {id(tensor) for tensor in study.uses.parameters}
    ids_by_name = {plain_name(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    if not ids <= set(ids_by_name.values()):  # a value computed from parameters was used
        return None
    return frozenset(name for name, parameter in ids_by_name.items() if parameter in ids)


def study_links(
    model: nn.Module, batch: Any, run: Run, blocks: Sequence[str], *, dim: int
) -> dict[tuple[str, str], Links]:
    """The links of :func:`find_links` in a copy of the model, without memory if possible; none if it fails.

    Raises:
        InputError: if something outside of a block uses a value that it keeps.
    """
    sizes = samples_and_tokens(batch)
    subject = TracedModel(model, batch, run, sizes, sizes)
    for prepare, at in ways_to_run(sizes):
        try:
            with prepare(subject, at) as (copy, small):
                modules = [copy.get_submodule(path) for path in blocks]
                pair_links = find_links(
                    copy, modules, dim, torch.device("cpu"), forward=partial(run, copy, small)
                )
            return {(blocks[source], blocks[other]): links for (source, other), links in pair_links.items()}
        except InputError:
            raise
        except Exception:  # of the user's model, in one of the ways
            continue
    return {}
