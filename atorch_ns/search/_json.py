"""The contracts of the search as JSON. Numbers that JSON does not have (NaN, infinities) become strings."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Hashable
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from atorch_ns.errors import InputError
from atorch_ns.search._outcome import SearchOutcome

__all__ = ["from_json", "outcome_from_json", "outcome_to_json", "to_json"]

T = TypeVar("T")

SCHEMA = 1

_WRITER: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))


def to_json(value: Any) -> str:
    """Any contract of this room, or a tuple of them, as JSON text of one form."""
    plain = _WRITER.dump_python(value, mode="json")
    return json.dumps(_finite(plain), allow_nan=False, separators=(",", ":"))


def from_json(kind: type[T], text: str | bytes) -> T:
    """What :func:`to_json` wrote, checked.

    Raises:
        InputError: if the text is no such thing; it says where and what was expected.
    """
    try:
        value: T = _adapter(cast("Hashable", kind)).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the top"
        more = f" ({error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
        name = getattr(kind, "__name__", str(kind))
        raise InputError(f"this is no {name}: at {where}: {first['msg']}{more}.") from None
    return value


def outcome_to_json(outcome: SearchOutcome) -> str:
    """A search's outcome as the content of ``report.json``."""
    document = {"schema": SCHEMA, "outcome": json.loads(to_json(outcome))}
    return json.dumps(document, indent=1, allow_nan=False)


def outcome_from_json(text: str | bytes) -> SearchOutcome:
    """What :func:`outcome_to_json` wrote.

    Raises:
        InputError: if it is something else, or of a schema that this version does not know.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InputError(f"this is no search outcome: it is not JSON: {error}.") from None
    if not isinstance(document, dict) or "outcome" not in document:
        raise InputError("this is no search outcome: it has no key 'outcome' at the top.")
    if document.get("schema") != SCHEMA:
        raise InputError(
            f"this search outcome has schema {document.get('schema')!r}, and this version reads {SCHEMA}. "
            "Read it with the version that wrote it."
        )
    return from_json(SearchOutcome, json.dumps(document["outcome"]))


@functools.cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("Any", kind))


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as the strings that pydantic reads as such."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
