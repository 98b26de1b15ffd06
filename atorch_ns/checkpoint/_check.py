"""Does a checkpoint fit the model that is to be loaded? Said before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from atorch_ns.checkpoint._manifest import Manifest, TensorRecord
from atorch_ns.errors import CheckpointError

__all__ = ["check_model", "check_names"]

_SHOWN = 5


def check_model(
    manifest: Manifest,
    weights: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    extra_states: Mapping[str, torch.Tensor],
) -> None:
    """Compares names, shapes and kinds of dtype.

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


def check_names(what: str, there: Sequence[str], here: Sequence[str], *, source: str) -> None:
    """Checks that two lists of names are equal as sets.

    Raises:
        CheckpointError: naming the first few that only one has.
    """
    if problems := _names(what, there, here):
        raise CheckpointError(f"{source} is of another model:\n  " + "\n  ".join(problems))


def _differences(
    what: str, there: Mapping[str, TensorRecord], here: Mapping[str, torch.Tensor]
) -> list[str]:
    problems = _names(what, there.keys(), here.keys())
    changed = []
    for name in here.keys() & there.keys():
        shape, dtype = tuple(here[name].shape), here[name].dtype
        saved: torch.dtype = getattr(torch, there[name].dtype)
        if shape != there[name].shape:
            changed.append(f"{name} is {shape} here and {there[name].shape} in the checkpoint")
        elif dtype.is_floating_point != saved.is_floating_point or dtype.is_complex != saved.is_complex:
            changed.append(f"{name} is {dtype} here and {saved} in the checkpoint")
    if changed:
        problems.append(f"{len(changed)} {what}(s) differ: {_few(changed)}")
    return problems


def _names(what: str, there: object, here: object) -> list[str]:
    saved, present = set(there), set(here)  # type: ignore[call-overload]
    problems = []
    if missing := present - saved:
        problems.append(f"{len(missing)} {what}(s) missing in the checkpoint: {_few(missing)}")
    if unexpected := saved - present:
        problems.append(f"{len(unexpected)} {what}(s) that this model does not have: {_few(unexpected)}")
    return problems


def _few(texts: object) -> str:
    ordered = sorted(texts)  # type: ignore[call-overload]
    return ", ".join(ordered[:_SHOWN]) + (", …" if len(ordered) > _SHOWN else "")
