"""Input formats: how a batch is passed to a model, by what its ``forward`` takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from torch import nn

InputFormat = Literal["auto", "none", "unpack_sequence", "unpack_dict", "first", "unpack_first"]

_REMEDY: Final = (
    "Choose the input format (none passes the batch as it is, first its first item), or let the sample be what "
    "forward takes; the loss is given the whole batch."
)


def assumed_format(batch: Any) -> str | None:
    """The ``model_input_format`` that suits a batch: dictionaries and sequences are unpacked."""
    if isinstance(batch, Mapping):
        return "unpack_dict"
    return "unpack_sequence" if isinstance(batch, (list, tuple)) else None


def check_format(text: str) -> InputFormat:
    """The input format of that name.

    Raises:
        InputError: it is not; all are named.
    """
    formats: tuple[InputFormat, ...] = get_args(InputFormat)
    for input_format in formats:
        if text == input_format:
            return input_format
    raise InputError(f"the input format {text!r} is not one of {', '.join(formats)}.")


def chosen_format(input_format: InputFormat, model: nn.Module, sample: Any) -> tuple[InputFormat, str]:
    """The input format of a batch, and a line that explains it where it is not obvious.

    ``auto`` goes by ``forward``'s signature: it unpacks sequences, and dictionaries by the keys named there.
    Of a sequence that does not fit, it passes the first item; a dictionary with no such key it passes whole.

    Raises:
        InputError: if ``forward`` can take the batch in none of these ways.
    """
    from atorch_ns.data import forward_signature  # imports torch, which naming formats does not need

    if input_format != "auto":
        _check_fit(input_format, sample)
        return input_format, ""
    usual_format = assumed_format(sample)
    signature = forward_signature(model)
    if usual_format == "unpack_dict":
        return _of_dictionary(signature, model, sample)
    if usual_format != "unpack_sequence":  # one tensor, or an object of the user's
        return "none", ""
    # A forward that is not written in Python has no signature: unpacking is the convention.
    if signature is None or _can_bind(signature, *sample):
        return "unpack_sequence", ""
    what = f"the sample is a sequence of {len(sample)} items, and {_forward_text(model, signature)}"
    if len(sample) and _can_bind(signature, sample[0]):
        return "first", f"{what}: only the first item is passed to the model (input format first)"
    raise InputError(f"{what}. {_REMEDY}")


def _check_fit(input_format: InputFormat, sample: Any) -> None:
    from atorch_ns.data import call_model

    try:  # the model takes anything, so a failure comes from the format itself
        call_model(lambda *_, **__: None, sample, None if input_format == "none" else input_format)
    except InputError as error:
        raise InputError(f"the sample does not fit the input format {input_format}: {error}") from None


def _of_dictionary(
    signature: inspect.Signature | None, model: nn.Module, sample: Mapping[Any, Any]
) -> tuple[InputFormat, str]:
    names = all(isinstance(key, str) for key in sample)
    if signature is None or (names and _can_bind(signature, **sample)):
        return "unpack_dict", ""
    what = (
        f"the sample is a dictionary of {', '.join(map(repr, sample))}, and {_forward_text(model, signature)}"
    )
    arguments = {key: value for key, value in sample.items() if key in signature.parameters}
    if names and arguments and _can_bind(signature, **arguments):  # call_model drops the other keys
        left_out = [repr(key) for key in sample if key not in arguments]
        verb = "is" if len(left_out) == 1 else "are"
        return "unpack_dict", f"{what}: {', '.join(left_out)} {verb} for the loss alone"
    # With a key that forward knows, the other arguments are missing: an error, not a batch passed whole.
    if not set(sample) & set(signature.parameters) and _can_bind(signature, sample):
        return "none", f"{what}: it is passed whole (input format none)"
    raise InputError(f"{what}. {_REMEDY}")


def _can_bind(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _forward_text(model: nn.Module, signature: inspect.Signature) -> str:
    names = ", ".join(signature.parameters) or "nothing"
    return f"forward of {type(model).__name__} takes {names}"
