"""How tensor_parallel comes by a loss on parts of the logits: whether it can, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import agree
from atorch_ns.data import call_model
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.profile import repeated_blocks
from atorch_ns.sharding import (
    LOSS_TOLERANCE,
    ChosenPlan,
    Division,
    LayerGraph,
    Layout,
    LogitOutputs,
    LogitUses,
    LossStudy,
    compare_losses,
    explain_divided_weights,
    study_logits,
)
from atorch_ns.torch_compat import plain_name

__all__ = ["LossOnParts", "ParallelLoss", "divide_logits", "guard_loss", "loss_on_parts"]

ParallelLoss = bool | Literal["auto"]


@dataclass(frozen=True)
class LossOnParts:
    """Whether a loss is computed on parts of the logits.

    Attributes:
        heads: paths of the layers whose outputs stay divided; empty where they are gathered.
        note: what was decided and why, for the report; empty if there is nothing to decide.
    """

    heads: tuple[str, ...] = ()
    note: str = ""


def loss_on_parts(
    job: Job,
    model: nn.Module,
    batch: Any,
    chosen: ChosenPlan,
    graph: LayerGraph,
    division: Division,
    *,
    wanted: ParallelLoss,
    really: bool,
) -> LossOnParts:
    """Tests the user's loss on a small batch, on divided and on whole logits; collective.

    Args:
        job: the loss and how batches are passed.
        model: whole.
        batch: a sample batch on the CPU.
        chosen: how layers are divided.
        graph: how they are connected.
        division: this rank's place.
        wanted: the user's setting.
        really: whether to compute in the test.

    Raises:
        InputError: if the user wants it and it would be wrong.
    """
    heads = tuple(
        path
        for path, layer in chosen.layout.layers.items()
        if layer.style == "colwise_gather_output" and path in graph.outputs
    )
    if wanted is False or not heads:
        why = "no layer that gives logits is divided" if wanted is True else ""
        return LossOnParts(note=f"parallel_loss=True changes nothing: {why}" if why else "")
    wrong, idle = _reasons(job, model, batch, heads, division, really=really)
    if wanted is True and wrong:
        raise InputError(
            f'parallel_loss=True cannot be used with {job.model_class}: {wrong}. Set it to "auto" or False.'
        )
    if wrong or (idle and wanted == "auto"):
        return LossOnParts(note=f"logits are gathered before the loss: {wrong or idle}")
    note = "the loss is computed on parts of the logits" + (f", although {idle}" if idle else "")
    return LossOnParts(heads, note)


def _reasons(
    job: Job, model: nn.Module, batch: Any, heads: tuple[str, ...], division: Division, *, really: bool
) -> tuple[str, str]:
    """Why a loss on parts would be wrong, and why it would be of no use; empty where neither is so."""
    if job.plan.compiled and not repeated_blocks(model):
        return "the compiler would compile the whole model with its loss", ""

    def run(module: nn.Module, data: Any) -> Any:
        return call_model(module, data, job.inputs.model_input_format)

    study = agree(
        lambda: study_logits(model, batch, run, heads, division.degree),
        what="following the logits",
        distributed=True,
    )
    if study.uses.changed:
        return f"{job.model_class} changes them in place, by {study.uses.changed[0]}", ""
    if study.failure:
        return "", f"{job.model_class} does not run on parts of them: {study.failure}"
    if not really:
        return "", "nothing is tested, since self_test=False or no rank can be reached"
    return _by_numbers(job, study, division)


def _by_numbers(job: Job, study: LossStudy, division: Division) -> tuple[str, str]:
    seen = LogitUses()
    failure = ""
    error = 0.0
    try:
        error = compare_losses(study, job.inputs.loss_func, division, seen)
    except Exception as failed:
        failure = f"{type(failed).__name__}: {failed}".splitlines()[0]
    failures: list[Any] = [None] * division.degree
    dist.all_gather_object(failures, (failure, list(seen.changed)), group=division.group)
    changed = next((names[0] for _, names in failures if names), "")
    if changed:
        return f"loss_func changes them in place, by {changed}", ""
    failure = next((text for text, _ in failures if text), "")
    if failure:
        return "", f"loss_func cannot be tested on a small batch: {failure}"
    if error > LOSS_TOLERANCE:
        return f"on a small batch loss or gradients differ by {error:.1e} of their largest value", ""
    gathered = {**study.uses.gathered, **seen.gathered}
    if gathered:
        return "", f"they are needed whole by {', '.join(gathered.values())}"
    if not (study.uses.losses or seen.losses):
        return "", "no cross_entropy of them is computed"
    return "", ""


def divide_logits(job: Job, found: LossOnParts, here: Layout) -> None:
    """Lets the heads of this rank's part of the divided model give divided logits in training steps.

    Args:
        job: with the divided model.
        found: the heads.
        here: the layers that are divided on this rank.
    """
    modules = {plain_name(path): module for path, module in job.module.named_modules()}
    heads = [modules[path] for path in found.heads if path in here.layers]
    if heads:
        outputs = LogitOutputs()
        outputs.attach(job.module, heads)
        job.in_step = outputs.stay_divided


def guard_loss(job: Job) -> None:
    """Lets a loss that reads divided weights say so."""
    job.watch_loss = lambda loss: explain_divided_weights(loss, job.module)
