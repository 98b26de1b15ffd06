"""From the options of a verb that trains to what ``auto_accelerate`` takes; on a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from atorch_ns.cli._input_format import check_format, chosen_format
from atorch_ns.cli._objects import load_object, load_sample, not_built
from atorch_ns.cli._planning import say
from atorch_ns.cli._words import a_kind
from atorch_ns.errors import InputError

__all__ = ["NamedJob", "named_job"]

_SEED = 0


class NamedJob(NamedTuple):
    """What the options name, built.

    Attributes:
        model: with values.
        optimizer: its class or function.
        loss: ``(batch, output) -> loss``.
        sample: a batch.
        input_format: of ``auto_accelerate``.
    """

    model: Any
    optimizer: Any
    loss: Any
    sample: Any
    input_format: str | None


def named_job(request: Mapping[str, Any]) -> NamedJob:
    """Builds what a request names. Random numbers begin alike on every rank.

    Raises:
        InputError: if something cannot be found, built or used.
    """
    import torch

    from atorch_ns.engine._assumed_loss import AssumedLoss

    torch.manual_seed(_SEED)
    model = _model(request["model"])
    sample = load_sample(request["sample"])
    loss = AssumedLoss() if request["loss"] is None else load_object(request["loss"], option="--loss")
    if not callable(loss):
        raise InputError(
            f"--loss={request['loss']!r} is {a_kind(loss)}; it must be a function (batch, output) -> loss."
        )
    given, why = chosen_format(check_format(request["input_format"]), model, sample)
    if why and os.environ.get("RANK", "0") == "0":
        say(why)
    optimizer = load_object(request["optimizer"], option="--optimizer")
    if not callable(optimizer):
        raise InputError(
            f"--optimizer={request['optimizer']!r} is {a_kind(optimizer)}; it must make an optimizer."
        )
    return NamedJob(model, optimizer, loss, sample, None if given == "none" else given)


def _model(name: str) -> Any:
    from torch import nn

    built = load_object(name, option="--model")
    if isinstance(built, nn.Module):
        return built
    if not callable(built):
        raise InputError(f"--model={name!r} is {a_kind(built)}; it must be a module, or build one.")
    try:
        model = built()
    except (Exception, SystemExit) as error:
        raise not_built(name, error) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"--model={name!r} returned {a_kind(model)}; it must return a torch.nn.Module.")
    return model
