"""Checkpoints of a MerakTrainer: states that any layout of ranks loads, beside transformers' files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from atorch_ns import checkpoint
from atorch_ns.checkpoint.contents import capture_rng, class_name, restore_rng
from atorch_ns.checkpoint.folder import MANIFEST
from atorch_ns.checkpoint.manifest import Manifest
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.text import error_text

log = logging.getLogger("atorch_ns")


def save(
    result: Result, folder: str, step: int, *, position: Mapping[str, int], optimizer: bool = True
) -> None:
    """Saves weights, optimizer, scheduler, loss scale and the random states that ranks share. Collective.

    Args:
        result: the job.
        folder: the folder of the checkpoint, as ``out/checkpoint-100``.
        step: updates so far.
        position: ``epoch``, number of finished ``batches`` in it, and their ``global_batch_size``.
        optimizer: whether the optimizer's states are among them.

    Raises:
        CheckpointError: on all ranks, if the folder cannot be written.
    """
    checkpoint.save(folder, result if optimizer else result.having(optim=None), step=step, position=position)


def load(result: Result, folder: str, *, optimizer: bool = True) -> dict[str, torch.Tensor] | None:
    """Loads a checkpoint of any front end or transformers' Trainer. Random states stay. Collective.

    A scheduler missing from the checkpoint continues from the number of steps, if its rates follow from it.

    Args:
        result: the job.
        folder: the folder of the checkpoint.
        optimizer: whether the optimizer's and the scheduler's states are loaded.

    Returns:
        The random states to continue with, or ``None`` if the number of ranks was different at the save.

    Raises:
        CheckpointError: if there are no weights of this model.
    """
    cluster = result.job.cluster

    def look() -> tuple[Path | None, str]:
        ckpt = _checkpoint_in(folder)
        record = None if ckpt is None else Manifest.read(ckpt).scheduler
        return ckpt, "" if record is None else record.class_name

    path, saved_class = cluster.on_first(look, what="looking for the checkpoint")
    if path is None:
        if cluster.rank == 0:
            log.warning("%s holds only weights: the optimizer starts without states.", folder)
        checkpoint.import_safetensors(result, folder)
        return None
    before = capture_rng(result.job.device, result.job.step.randomness)  # loading changes them
    scheduler = result.lr_scheduler
    same = saved_class == class_name(scheduler)
    target = result if optimizer else result.having(optim=None)
    ckpt = checkpoint.load(
        path, target if optimizer and same else target.having(lr_scheduler=None), data_position=False
    )
    # Its rates depend only on the number of steps.
    if optimizer and not same and isinstance(scheduler, LambdaLR):
        scheduler.last_epoch = ckpt["step"] - 1
        scheduler.step()  # sets the rates of that step
    random = capture_rng(result.job.device, result.job.step.randomness)
    restore_rng(before, result.job.device, result.job.step.randomness)
    return random if ckpt["world_size"] == cluster.world_size else None


def _checkpoint_in(folder: str) -> Path | None:
    path = Path(folder)
    return path if (path / MANIFEST).is_file() else checkpoint.latest(path)


def position(folder: str, steps_per_epoch: int, global_batch_size: int) -> tuple[int, int, int]:
    """Progress of another front end's checkpoint: steps, epoch, and steps of it in batches of this size."""
    path = _checkpoint_in(folder)
    assert path is not None
    manifest = Manifest.read(path)
    if manifest.data is None:
        return manifest.step, *divmod(manifest.step, steps_per_epoch)
    samples = manifest.data["batches"] * manifest.data["global_batch_size"]
    steps, rest = divmod(samples, global_batch_size)
    if rest:
        log.warning("%s: the global batch size has changed; %d samples are repeated.", folder, rest)
    epochs, steps = divmod(steps, steps_per_epoch)
    return manifest.step, manifest.data["epoch"] + epochs, steps


def position_at(epoch: float, steps_per_epoch: int, global_batch_size: int) -> dict[str, int]:
    """The position in the data at which transformers' Trainer counts ``epoch`` epochs."""
    whole, steps = divmod(round(epoch * steps_per_epoch), steps_per_epoch)
    return {"epoch": whole, "batches": steps, "global_batch_size": global_batch_size}


def has_trainer_state(folder: str) -> bool:
    """Returns whether a folder is a checkpoint of transformers' Trainer, not of another front end."""
    return (Path(folder) / TRAINER_STATE_NAME).is_file()


def last_in(folder: str) -> str | None:
    """The last complete checkpoint of a run's folder. The Trainer's state is written last."""
    places = [path for path in Path(folder).glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    paths = [path for path in places if (path / TRAINER_STATE_NAME).is_file()] or places
    return str(max(paths, key=lambda path: int(path.name.rpartition("-")[2]))) if paths else None


def resolve_checkpoint(setting: Any, output_dir: str) -> tuple[str | None, bool]:
    """The checkpoint meant by ``resume_from_checkpoint``, and whether it has more than weights.

    Raises:
        CheckpointError: if it is not there, or damaged.
    """
    if not setting:
        return None, False
    path = last_in(output_dir) if setting is True else str(setting)
    if path is None or not Path(path).is_dir():
        raise CheckpointError(
            f"resume_from_checkpoint={setting!r}: there is no checkpoint {path or f'in {output_dir}'}."
        )
    inside = _checkpoint_in(path)
    if inside is not None and has_trainer_state(str(inside.parent)):
        path = str(inside.parent)  # of a run, or of one step
    if not has_trainer_state(path):
        return path, inside is not None  # False for weights alone
    state = Path(path) / TRAINER_STATE_NAME
    try:
        TrainerState.load_from_json(str(state))  # read before anything is loaded
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{state} is damaged: {error_text(error)}") from error
    return path, True
