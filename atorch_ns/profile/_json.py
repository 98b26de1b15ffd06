"""Profiles as JSON, so that planning needs neither the model nor its packages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from atorch_ns.errors import InputError

__all__ = ["SCHEMA", "dumps", "loads"]

SCHEMA = 1
"""Version of the form of a profile's JSON; another is refused."""

_T = TypeVar("_T")


def dumps(value: Any) -> str:
    """A dataclass instance as JSON with its schema; equal instances give equal text."""
    return json.dumps({"schema": SCHEMA, **_plain(value)}, sort_keys=True, separators=(",", ":"))


def loads(kind: type[_T], text: str | bytes) -> _T:
    """The instance of ``kind`` that :func:`dumps` wrote.

    Raises:
        InputError: if the text is no JSON, of another schema, or does not hold what ``kind`` needs.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        data = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"the profile is not JSON: {error}. Write it anew with Profile.to_json()."
        ) from error
    if not isinstance(data, dict) or "schema" not in data:
        raise InputError(f"the profile must be an object with a 'schema'; it is {_shortened(data)}.")
    schema = data.pop("schema")
    if schema != SCHEMA:
        raise InputError(
            f"the profile has schema {schema!r}, but this version reads {SCHEMA}. Profile the model again."
        )
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"the profile cannot be read: {place or 'its root'}: {first['msg']} "
            f"({error.error_count()} problems). Profile the model again."
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
