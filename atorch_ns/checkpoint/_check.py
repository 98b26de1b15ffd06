"""Does a checkpoint fit the model that is to be loaded? Said before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from atorch_ns.checkpoint._contents import class_name
from atorch_ns.checkpoint._groups import check_groups
from atorch_ns.checkpoint._manifest import Manifest, TensorRecord
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result, StepOptimizer, TrainingStates

__all__ = ["check_model", "check_training", "left_out"]

_SHOWN = 5


def check_model(
    manifest: Manifest,
    weights: Mapping[str, TensorRecord],
    buffers: Mapping[str, TensorRecord],
    extra_states: Mapping[str, TensorRecord],
) -> None:
    """Compares names, shapes and kinds of dtype of the whole model here with those of the checkpoint.

    Raises:
        CheckpointError: naming the first few tensors that are missing, unexpected or different.
    """
    problems = [
        *_differences("parameter", manifest.weights, weights),
        *_differences("buffer", manifest.buffers, buffers),
        *_names("extra state", manifest.extra_states.keys(), extra_states.keys()),
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint is of another model ({manifest.model_class} at step {manifest.step}):\n  "
            + "\n  ".join(problems)
        )


def check_training(
    manifest: Manifest, states: TrainingStates, result: Result, *, data_position: bool
) -> None:
    """Compares optimizer, parameter groups, scheduler and batches, where both sides have them.

    Raises:
        CheckpointError: saying what differs.
    """
    _check_optimizer(manifest, states, result)
    _check_scheduler(manifest, result)
    if data_position:
        _check_data(manifest, result)


def left_out(manifest: Manifest, result: Result, *, data_position: bool) -> list[str]:
    """What the checkpoint holds that there is nothing here to restore to, or the reverse; a sentence each."""
    optimizer = result.optim
    scaler = optimizer.scaler if isinstance(optimizer, StepOptimizer) else None
    rows: list[tuple[str, object, object]] = [
        ("optimizer", manifest.optimizer, optimizer),
        ("lr_scheduler", manifest.scheduler, result.lr_scheduler),
        ("loss scaler", manifest.scaler, scaler),
    ]
    if data_position:
        rows.append(("data position", manifest.data, result.dataloader))
    notes = [
        _note(what, saved is not None) for what, saved, here in rows if (saved is None) != (here is None)
    ]
    if manifest.world_size != result.job.cluster.world_size:
        notes.append(
            f"saved by {manifest.world_size} rank(s) and loaded by {result.job.cluster.world_size}: random numbers "
            "drawn during training (dropout) do not continue exactly"
        )
    return notes


def _check_optimizer(manifest: Manifest, states: TrainingStates, result: Result) -> None:
    record, optimizer = manifest.optimizer, result.optim
    if record is None or optimizer is None:
        return
    if record.class_name != states.optimizer_class():
        raise CheckpointError(
            f"the checkpoint holds states of {record.class_name}, and this job trains with "
            f"{states.optimizer_class()}. Use the same optimizer, or import_state_dict for the weights alone."
        )
    ordered = manifest.scheduler is not None and result.lr_scheduler is not None
    check_groups(record.groups, states.group_names(), optimizer.param_groups, ordered=ordered)


def _check_scheduler(manifest: Manifest, result: Result) -> None:
    record, scheduler = manifest.scheduler, result.lr_scheduler
    if record is not None and scheduler is not None and record.class_name != class_name(scheduler):
        raise CheckpointError(
            f"the checkpoint holds the state of {record.class_name}, and this job has {class_name(scheduler)}. "
            "Use the same lr_scheduler_cls, or none and make a new one after loading."
        )


def _check_data(manifest: Manifest, result: Result) -> None:
    loader, saved = result.dataloader, manifest.data
    if loader is None or saved is None:
        return
    if saved.get("global_batch_size") != loader.global_batch_size:
        raise CheckpointError(
            f"the checkpoint counts batches of {saved.get('global_batch_size')} samples, and the global batch here "
            f"has {loader.global_batch_size}, so the position in the data does not carry over. Use the batch_size "
            "it was saved with, or load(..., data_position=False) to begin an epoch."
        )


def _differences(what: str, there: Mapping[str, TensorRecord], here: Mapping[str, TensorRecord]) -> list[str]:
    problems = _names(what, there.keys(), here.keys())
    changed = []
    for name in here.keys() & there.keys():
        shape = here[name].shape
        dtype: torch.dtype = getattr(torch, here[name].dtype)
        saved: torch.dtype = getattr(torch, there[name].dtype)
        if shape != there[name].shape:
            changed.append(f"{name} is {shape} here and {there[name].shape} in the checkpoint")
        elif dtype.is_floating_point != saved.is_floating_point or dtype.is_complex != saved.is_complex:
            changed.append(f"{name} is {dtype} here and {saved} in the checkpoint")
    if changed:
        problems.append(f"{len(changed)} {what}(s) differ: {_few(changed)}")
    return problems


def _names(what: str, there: Iterable[str], here: Iterable[str]) -> list[str]:
    saved, present = set(there), set(here)
    problems = []
    if missing := present - saved:
        problems.append(f"{len(missing)} {what}(s) missing in the checkpoint: {_few(missing)}")
    if unexpected := saved - present:
        problems.append(f"{len(unexpected)} {what}(s) that this model does not have: {_few(unexpected)}")
    return problems


def _few(texts: Iterable[str]) -> str:
    ordered = sorted(texts)
    return ", ".join(ordered[:_SHOWN]) + (", …" if len(ordered) > _SHOWN else "")


def _note(what: str, saved: bool) -> str:
    if saved:
        return f"its {what} is not used: this job has none"
    return f"it holds no {what}: the one here begins anew"
