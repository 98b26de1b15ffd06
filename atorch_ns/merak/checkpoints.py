"""Checkpoints of a MerakTrainer: states that any layout of ranks loads, beside the files that transformers writes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from atorch_ns import checkpoint
from atorch_ns.checkpoint.contents import capture_rng, restore_rng
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.text import error_text

log = logging.getLogger("atorch_ns")


def save(result: Result, folder: str, step: int, *, optimizer: bool = True) -> None:
    """Saves weights, optimizer, scheduler, loss scale and the random states that ranks share; collective.

    Args:
        result: the job.
        folder: the folder of the checkpoint, as ``out/checkpoint-100``.
        step: updates so far.
        optimizer: whether the optimizer's states are among them.

    Raises:
        CheckpointError: on all ranks, if the folder cannot be written.
    """
    checkpoint.save(folder, result if optimizer else result.having(optim=None), step=step)


def load(result: Result, folder: str, *, optimizer: bool = True) -> dict[str, torch.Tensor] | None:
    """Loads a checkpoint that :func:`save` or transformers' Trainer has written; collective. Random states are left.

    Args:
        result: the job.
        folder: the folder of the checkpoint.
        optimizer: whether the optimizer's and the scheduler's states are loaded.

    Returns:
        The random states to go on with; ``None`` where as many ranks had not saved them.

    Raises:
        CheckpointError: if there are no weights of this model.
    """
    cluster = result.job.cluster
    place = cluster.on_first(lambda: checkpoint.latest(folder), what="looking for the checkpoint")
    if place is None:
        load_weights(result, folder)
        return None
    before = capture_rng(result.job.device, result.job.step.randomness)
    found = checkpoint.load(place, result if optimizer else result.having(optim=None, lr_scheduler=None))
    random = capture_rng(result.job.device, result.job.step.randomness)
    restore_rng(before, result.job.device, result.job.step.randomness)
    return random if found["world_size"] == cluster.world_size else None


def load_weights(result: Result, folder: str) -> None:
    """Loads the weights of a folder that ``save_pretrained`` has written; collective. The optimizer begins anew.

    Raises:
        CheckpointError: if there are none of this model.
    """
    if result.job.cluster.rank == 0:
        log.warning("%s holds weights alone: the optimizer begins anew.", folder)
    checkpoint.import_safetensors(result, folder)


def last_in(folder: str) -> str | None:
    """The last checkpoint of a run's folder that was written whole: the Trainer's state comes last."""
    places = [path for path in Path(folder).glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    found = [path for path in places if (path / TRAINER_STATE_NAME).is_file()] or places
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None


def named(given: Any, output_dir: str) -> tuple[str | None, bool]:
    """The checkpoint that ``resume_from_checkpoint`` means, and whether a run can go on from it: else it holds weights alone.

    Raises:
        CheckpointError: if it is not there, or damaged.
    """
    if not given:
        return None, False
    found = last_in(output_dir) if given is True else str(given)
    if found is None or not Path(found).is_dir():
        raise CheckpointError(
            f"resume_from_checkpoint={given!r}: there is no checkpoint {found or f'in {output_dir}'}."
        )
    state = Path(found) / TRAINER_STATE_NAME
    if not state.is_file():
        return found, False
    try:
        TrainerState.load_from_json(str(state))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{state} is damaged: {error_text(error)}") from error
    return found, True
