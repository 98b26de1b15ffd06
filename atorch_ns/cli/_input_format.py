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

    Dictionaries and sequences are unpacked, a dictionary with the keys that ``forward`` names. Of a sequence that it
    cannot take, the first item is passed, as of ``(features, labels)`` to a model of features. A dictionary none of
    whose keys it knows is passed whole.

    Raises:
        InputError: if ``forward`` can take the batch in none of these ways.
    """
    from atorch_ns.data import forward_signature
    from atorch_ns.engine._assumed_loss import assumed_format

    if asked != "auto":
        _check_fit(asked, sample)
        return asked, ""
    unpacked = assumed_format(sample)
    signature = forward_signature(model)
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


def _check_fit(asked: InputFormat, sample: Any) -> None:
    """Whether a batch can be passed so, whatever ``forward`` takes; before anything is computed with it."""
    from atorch_ns.data import call_model

    try:
        call_model(lambda *_, **__: None, sample, None if asked == "none" else asked)
    except InputError as error:
        raise InputError(f"--sample does not fit --input-format={asked}: {error}") from None


def _of_dictionary(
    signature: inspect.Signature | None, model: nn.Module, sample: Mapping[Any, Any]
) -> tuple[InputFormat, str]:
    names = all(isinstance(key, str) for key in sample)
    if signature is None or (names and _takes(signature, **sample)):
        return "unpack_dict", ""
    what = f"--sample is a dictionary of {', '.join(map(repr, sample))}, and {_forward(model, signature)}"
    known = {key: value for key, value in sample.items() if key in signature.parameters}
    if names and known and _takes(signature, **known):
        left_out = ", ".join(repr(key) for key in sample if key not in known)
        return (
            "unpack_dict",
            f"{what}: {left_out} {'is' if len(sample) - len(known) == 1 else 'are'} for the loss alone",
        )
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
