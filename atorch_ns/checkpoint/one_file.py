"""Checkpoints in one file: whole tensors as a plain model and an optimizer of torch take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from atorch_ns.checkpoint.contents import BUFFER, EXTRA_STATE, RNG, STATE, WEIGHT
from atorch_ns.checkpoint.files import check_files
from atorch_ns.checkpoint.folder import find
from atorch_ns.checkpoint.manifest import Manifest, decode
from atorch_ns.checkpoint.tensors import INDEX, describe_tensors, read_tensors, write_tensors
from atorch_ns.errors import CheckpointError
from atorch_ns.text import error_text

_MANIFEST: Final = "manifest"


def merge(
    folder: Path,
    output: Path,
    *,
    tied: Mapping[str, Sequence[str]] | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint as one file, which ``torch.load`` reads; in one process.

    It has ``model``, ``optimizer`` (``state`` and ``param_groups`` in the model's order of parameters) and
    ``lr_scheduler``, which plain modules load strictly, data for :func:`unmerge`, and rank 0's random states.

    Args:
        folder: the checkpoint.
        output: the file, written whole or not at all.
        tied: other names of tied weights, by the first; a plain module's state dict has them all.
        more: further values of the caller.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or the file cannot be written.
    """
    folder = find(folder)
    manifest = Manifest.read(folder)
    check_files(folder, manifest.files or {}, list(manifest.files or [INDEX]))
    prefixes = (WEIGHT, BUFFER, EXTRA_STATE, STATE, f"{RNG}0.")  # of random states those of rank 0
    specs = {key: spec for key, spec in describe_tensors(folder).items() if key.startswith(prefixes)}
    tensors = {key: torch.empty(spec.shape, dtype=spec.dtype) for key, spec in specs.items()}
    read_tensors(tensors, folder, distributed=False)
    alone = {"world_size": 1, "rng_digests": manifest.rng_digests[:1], "files": None}  # files get new digests
    scheduler = manifest.scheduler
    model = _select_prefix(tensors, WEIGHT) | _select_prefix(tensors, BUFFER)
    model |= {other: model[name] for name, others in (tied or {}).items() for other in others}
    document = {
        **(more or {}),
        "model": model,
        "optimizer": _optimizer_state(manifest, tensors),
        "lr_scheduler": None if scheduler is None else decode(scheduler.state),
        "tensors": tensors,  # the same ones, by the checkpoint's keys
        _MANIFEST: manifest.model_copy(update=alone).model_dump_json(),
    }
    draft = output.with_name(f".{output.name}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        torch.save(document, draft)
        draft.replace(output)
    except (OSError, RuntimeError) as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {output}: {error_text(error)}") from error


def unmerge(document: Mapping[str, Any], folder: Path) -> None:
    """Turns a file of :func:`merge` into a checkpoint again, for any number of ranks. Runs in one process.

    Args:
        document: the result of ``torch.load``.
        folder: an empty folder.

    Raises:
        CheckpointError: if it is another kind of file.
    """
    if not isinstance(document, Mapping) or _MANIFEST not in document or "tensors" not in document:
        raise CheckpointError("the file was not written by merge: it holds no manifest.")
    write_tensors(document["tensors"], folder, distributed=False, group=None)
    Manifest.model_validate_json(document[_MANIFEST]).write(folder)


def _select_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _optimizer_state(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    record = manifest.optimizer
    if record is None:
        return None
    indices: dict[str, int] = {}
    groups = []
    order = {name: position for position, name in enumerate(manifest.weights)}  # the model's
    for group in record.groups:
        names = sorted(group.params, key=order.__getitem__)  # as model.parameters() would number them
        numbers = [indices.setdefault(name, len(indices)) for name in names]
        groups.append({**{key: decode(value) for key, value in group.options.items()}, "params": numbers})
    state: dict[int, dict[str, Any]] = {}
    for name, values in record.values.items():
        if name in indices:
            state.setdefault(indices[name], {}).update({key: decode(value) for key, value in values.items()})
    for key, tensor in _select_prefix(tensors, STATE).items():
        name, _, entry = key.rpartition(".")
        if name in indices:
            state.setdefault(indices[name], {})[entry] = tensor
    return {"state": state, "param_groups": groups}
