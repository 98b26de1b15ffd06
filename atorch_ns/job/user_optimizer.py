"""User's optimizer: ``optim_func``, called with a list of parameters where possible, with parameter groups otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from atorch_ns.errors import InputError
from atorch_ns.job.job import OPTIMIZER, Job, ParameterGroups
from atorch_ns.job.optimizer import optimizer_arguments
from atorch_ns.job.optimizer_checks import refuse_what_fails


def optim_func_parameters(job: Job, groups: ParameterGroups) -> list[Any]:
    """The first argument of ``optim_func``.

    A function that is given a list may filter it and make groups of its own. That is right only where parameters
    have their own shapes, and where this rank has all of them; elsewhere groups stay groups, and
    :func:`explained_groups` says so to a function that takes them for parameters.

    Args:
        job: the user's functions, and how parameters are divided.
        groups: of what ``optim_param_func`` chose, or one group of all parameters.
    """
    whole = job.plan.sharding.layout == "rows" and job.stage_group is None
    if not whole or job.inputs.optim_param_func is not None or len(groups) != 1 or not groups[0]["params"]:
        return list(groups)
    return list(groups[0]["params"])


@contextmanager
def explained_groups(job: Job, given: list[Any]) -> Iterator[None]:
    """Translates what a call of ``optim_func`` raises that takes groups for parameters.

    Raises:
        InputError: for a ``TypeError``, and for an ``AttributeError`` if groups are what it was given.
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        in_groups = any(isinstance(entry, dict) for entry in given)
        if isinstance(error, AttributeError) and not in_groups:
            raise
        hint = (
            " It is called with parameter groups here, [{'params': [...]}], since optim_param_func is given or this "
            "strategy cuts parameters or the model in parts; split groups by optim_param_func."
        )
        raise InputError(
            f"optim_func cannot be called with optim_args={job.inputs.optim_args}: {error}."
            f"{hint if in_groups else ''}"
        ) from error


def make_user_optimizer(job: Job, groups: ParameterGroups) -> torch.optim.Optimizer:
    """Calls the user's ``optim_func`` with what :func:`optim_func_parameters` makes of the groups.

    Raises:
        InputError: if it takes other arguments, or does not return a torch optimizer.
    """
    assert job.inputs.optim_func is not None
    arguments, why = optimizer_arguments(job.inputs.optim_func, job.inputs.optim_args, groups, job.roots)
    if why:
        job.explain(OPTIMIZER, why)
    parameters = optim_func_parameters(job, groups)
    with explained_groups(job, parameters):
        optimizer = job.inputs.optim_func(parameters, **arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optim_func returned a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    refuse_what_fails(optimizer)
    return optimizer
