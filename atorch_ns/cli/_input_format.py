"""How a batch is passed to the model: ``--input-format``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, get_args

from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from atorch_ns.engine._plan_offline import InputFormat

__all__ = ["check_format", "chosen_format"]

_REMEDY: Final = (
    "Choose --input-format (none passes the batch as it is, first its first item), or let --sample return what "
    "forward takes; the loss is given the whole batch."
)


def check_format(text: str) -> InputFormat:
    """The option's value, if it is one.

    Raises:
        InputError: it is not; all are named.
    """
    from atorch_ns.engine._plan_offline import InputFormat

    formats: tuple[InputFormat, ...] = get_args(InputFormat)
    for known in formats:
        if text == known:
            return known
    raise InputError(f"--input-format={text!r} is not one of {', '.join(formats)}.")


def chosen_format(asked: InputFormat, model: nn.Module, sample: Any) -> tuple[InputFormat, str]:
    """What ``auto`` means for a batch and the signature of the model's ``forward``, and a line on it if that is not plain.

    Dictionaries and sequences are unpacked. Of a sequence that ``forward`` cannot take, the first item is passed, as
    of ``(features, labels)`` to a model of features. A dictionary none of whose keys it knows is passed whole.

    Raises:
        InputError: if ``forward`` can take the batch in none of these ways.
    """
    from atorch_ns.engine._assumed_loss import assumed_format

    if asked != "auto":
        return asked, ""
    unpacked = assumed_format(sample)
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is not written in Python
        signature = None
    if unpacked == "unpack_dict":
        return _of_dictionary(signature, model, sample)
    if unpacked != "unpack_sequence":
        return "none", ""
    if signature is None or _takes(signature, *sample):
        return "unpack_sequence", ""
    what = f"--sample is a sequence of {len(sample)} items, and {_forward(model, signature)}"
    if len(sample) and _takes(signature, sample[0]):
        return "first", f"{what}: only the first item is passed to the model (--input-format first)"
    raise InputError(f"{what}. {_REMEDY}")


def _of_dictionary(
    signature: inspect.Signature | None, model: nn.Module, sample: Mapping[Any, Any]
) -> tuple[InputFormat, str]:
    names = all(isinstance(key, str) for key in sample)
    if signature is None or (names and _takes(signature, **sample)):
        return "unpack_dict", ""
    what = f"--sample is a dictionary of {', '.join(map(repr, sample))}, and {_forward(model, signature)}"
    if not set(sample) & set(signature.parameters) and _takes(signature, sample):
        return "none", f"{what}: it is passed whole (--input-format none)"
    raise InputError(f"{what}. {_REMEDY}")


def _takes(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _forward(model: nn.Module, signature: inspect.Signature) -> str:
    names = ", ".join(signature.parameters) or "nothing"
    return f"forward of {type(model).__name__} takes {names}"
