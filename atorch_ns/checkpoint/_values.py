"""Small states as JSON, and back, without pickle: schedulers, scalers, hyperparameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from atorch_ns.errors import CheckpointError
from atorch_ns.strategy import JSON

__all__ = ["decode", "encode", "plain_json"]

_TAG = "$"
_BARE = (bool, int, str)


def encode(value: Any, *, what: str) -> JSON:
    """JSON from which :func:`decode` makes an equal value.

    Numbers (infinite ones too), texts, lists, tuples, mappings with any such keys and ``Counter`` are kept as
    they are. A tensor or array of one element becomes its number.

    Args:
        value: what to write.
        what: what it is, for the message: ``"the scheduler's state"``.

    Raises:
        CheckpointError: naming the place inside ``value`` that has no such form, and its type.
    """
    if value is None or type(value) in _BARE:
        return value  # type: ignore[no-any-return]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and _num_elements(value) == 1:
        return encode(value.item(), what=what)
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if type(value) is list:
        return [encode(item, what=f"{what}[{place}]") for place, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "value": encode(list(value), what=what)}
    if type(value) in (dict, Counter):
        return _encode_mapping(value, what)
    raise CheckpointError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which has no form in a checkpoint: "
        "no objects are pickled. Keep numbers, texts, lists, tuples and dicts in it."
    )


def decode(value: JSON) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        CheckpointError: for a form that it does not write.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    content = value.get("value")
    if kind == "float" and isinstance(content, str):
        return float(content)
    if kind == "tuple":
        return tuple(decode(content))
    if kind in ("dict", "Counter") and isinstance(content, list):
        pairs = [(decode(entry[0]), decode(entry[1])) for entry in content]  # type: ignore[index]
        return Counter(dict(pairs)) if kind == "Counter" else dict(pairs)
    raise CheckpointError(f"the checkpoint holds a value of unknown form {kind!r}; a newer version wrote it.")


def plain_json(value: Any, *, what: str) -> JSON:
    """``value`` as a new copy, if JSON holds it as it is.

    Raises:
        CheckpointError: naming the place that it cannot hold.
    """
    if value is None or type(value) in _BARE or (type(value) is float and math.isfinite(value)):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain_json(item, what=f"{what}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain_json(item, what=f"{what}[{place}]") for place, item in enumerate(value)]
    raise CheckpointError(
        f"{what} is {str(value)[:80]!r}, a {type(value).__qualname__}; JSON cannot hold it."
    )


def _encode_mapping(value: dict[Any, Any], what: str) -> JSON:
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, what=f"{what}[{key!r}]") for key, item in value.items()}
    pairs: list[JSON] = [
        [encode(key, what=f"a key of {what}"), encode(item, what=f"{what}[{key!r}]")]
        for key, item in value.items()
    ]
    return {_TAG: type(value).__name__, "value": pairs}


def _num_elements(value: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else int(value.size)
