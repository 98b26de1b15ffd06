"""Hyperparameters of an optimizer's groups: saved with the names of the parameters they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from atorch_ns.checkpoint._manifest import GroupRecord
from atorch_ns.checkpoint._values import decode, encode
from atorch_ns.errors import CheckpointError

__all__ = ["check_groups", "record_groups", "restore_groups"]

_NOT_SAVED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""The parameters themselves, and how the update is computed, which is this run's affair."""


def record_groups(
    names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]
) -> tuple[GroupRecord, ...]:
    """The groups as they stand.

    Args:
        names: of each group's parameters.
        groups: the optimizer's ``param_groups``.

    Raises:
        CheckpointError: for a hyperparameter that has no form in a checkpoint.
    """
    return tuple(
        GroupRecord(params=tuple(own), options=_options(group, f"param_groups[{place}]"))
        for place, (own, group) in enumerate(zip(names, groups, strict=True))
    )


def check_groups(
    saved: Sequence[GroupRecord],
    names: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    *,
    ordered: bool,
) -> None:
    """Checks that every group here can be given the hyperparameters its parameters were saved with.

    Groups may be cut otherwise than they were if that loses nothing: if the parameters of a group here all
    had the same hyperparameters, and those of a group there all have the same ones here.

    Args:
        saved: the checkpoint's groups.
        names: of each group's parameters here.
        groups: the optimizer's ``param_groups`` here.
        ordered: whether something (a scheduler) tells groups apart by their number.

    Raises:
        CheckpointError: saying which parameters are in the way.
    """
    _check_members(saved, names)
    here = record_groups(names, groups)
    cuts = [[frozenset(group.params) for group in side] for side in (saved, here)]
    if cuts[0] == cuts[1] or (not ordered and set(cuts[0]) == set(cuts[1])):
        return
    if ordered:
        raise CheckpointError(
            f"the checkpoint has {len(saved)} parameter group(s) and this optimizer {len(here)}, cut or ordered "
            "differently, and the scheduler counts them. Give optim_param_func the groups it was saved with."
        )
    _check_uniform(here, saved, "a group of this optimizer mixes parameters that the checkpoint has")
    _check_uniform(saved, here, "a group of the checkpoint holds parameters that this optimizer has")


def restore_groups(
    saved: Sequence[GroupRecord], names: Sequence[Sequence[str]], groups: Sequence[dict[str, Any]]
) -> None:
    """Gives every group the hyperparameters of its parameters; :func:`check_groups` has passed."""
    options = _by_name(saved)
    for own, group in zip(names, groups, strict=True):
        if own:
            for key, value in decode(options[own[0]]).items():
                group[key] = _like(group.get(key), value)


def _options(group: Mapping[str, Any], what: str) -> dict[str, Any]:
    return {
        key: encode(_numbers(value), what=f"{what}[{key!r}]")
        for key, value in group.items()
        if key not in _NOT_SAVED
    }


def _numbers(value: Any) -> Any:
    """Learning rates and betas may be tensors, also inside a tuple."""
    if isinstance(value, (tuple, list)):
        return type(value)(_numbers(item) for item in value)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _like(present: Any, value: Any) -> Any:
    """``value`` in the form that it has here: a tensor keeps its identity, which kernels may have captured."""
    if isinstance(present, torch.Tensor):
        present.fill_(value)
        return present
    if isinstance(present, (tuple, list)) and isinstance(value, (tuple, list)) and len(present) == len(value):
        return type(present)(_like(*pair) for pair in zip(present, value, strict=True))
    return value


def _check_members(saved: Iterable[GroupRecord], names: Iterable[Iterable[str]]) -> None:
    there = {name for group in saved for name in group.params}
    here = {name for own in names for name in own}
    problems = []
    if missing := sorted(here - there):
        problems.append(f"{len(missing)} that the checkpoint did not train: {_few(missing)}")
    if unexpected := sorted(there - here):
        problems.append(f"without {len(unexpected)} that it did: {_few(unexpected)}")
    if problems:
        raise CheckpointError(
            f"the optimizer trains other parameters than the checkpoint's: {'; '.join(problems)}. Freeze and "
            "group parameters as they were, or use import_state_dict for the weights alone."
        )


def _check_uniform(groups: Iterable[GroupRecord], other: Sequence[GroupRecord], what: str) -> None:
    options = _by_name(other)
    for group in groups:
        first = group.params[0] if group.params else ""
        for name in group.params[1:]:
            if options[name] != options[first]:
                keys = sorted(
                    key
                    for key in options[name].keys() | options[first].keys()
                    if options[name].get(key) != options[first].get(key)
                )
                raise CheckpointError(
                    f"the parameter groups were cut differently: {what} under different {', '.join(keys)}: "
                    f"{first} and {name}. Give optim_param_func the groups it was saved with."
                )


def _by_name(groups: Iterable[GroupRecord]) -> dict[str, dict[str, Any]]:
    return {name: group.options for group in groups for name in group.params}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
