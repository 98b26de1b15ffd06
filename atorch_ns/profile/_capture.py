"""What each distinct block is called with, without running the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.profile._fake_steps import FakeSteps
from atorch_ns.profile._precisions import Precision
from atorch_ns.profile._real_steps import real_copy
from atorch_ns.profile._steps import Subject

__all__ = ["Call", "captured_calls"]


@dataclass(frozen=True)
class Call:
    """One call of a block: nests of :class:`torch.Tensor` (fake or real) and plain values.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _CapturedAllError(Exception):
    """Ends a forward pass once every block of interest has been called."""


def captured_calls(
    subject: Subject, precision: Precision, wanted: Mapping[str, str], how: str
) -> dict[str, Call]:
    """The first call of each block.

    Args:
        subject: the model and its batch.
        precision: in which it runs.
        wanted: paths of blocks, by fingerprint.
        how: ``"fake"`` or ``"real"``, as the trace was made.

    Returns:
        Calls by fingerprint; blocks that are never called are left out.
    """
    calls: dict[str, Call] = {}
    if how == "fake":
        with FakeSteps(subject, {}, "cpu").prepared(precision, subject.sizes) as (model, batch):
            _run(subject, precision, model, batch, wanted, calls)
    else:
        model, batch = real_copy(subject, precision, subject.sizes[0])
        _run(subject, precision, model, batch, wanted, calls)
    return calls


def _run(
    subject: Subject,
    precision: Precision,
    model: nn.Module,
    batch: Any,
    wanted: Mapping[str, str],
    calls: dict[str, Call],
) -> None:
    def hook(name: str) -> Callable[..., None]:
        def capture(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, Call(args, dict(kwargs)))
            if len(calls) == len(wanted):
                raise _CapturedAllError

        return capture

    for name, path in wanted.items():
        model.get_submodule(path).register_forward_pre_hook(hook(name), with_kwargs=True)
    precision.install(model, {path: model.get_submodule(path) for path in wanted.values()})
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    try:
        with torch.enable_grad(), precision.context(device_type):
            subject.forward_loss(model, batch)
    except _CapturedAllError:
        pass
