"""The base of every method's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool, model_validator
from pydantic.fields import FieldInfo

__all__ = ["Flag", "MethodConfig", "ModuleSelectors", "dtype_name", "selector_keys"]

Flag = StrictBool
"""True or False, and nothing that merely looks like it."""


class MethodConfig(BaseModel):
    """A method's settings: frozen, keyword-only, JSON values only, a description under each field.

    A subclass may accept shorthand by overriding :meth:`from_shorthand`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False
    )

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """The keys that a config written as something else than a mapping stands for.

        Raises:
            ValueError: if this method has no such shorthand.
        """
        raise ValueError(f"write its config as a mapping of {', '.join(cls.model_fields) or 'nothing'}")

    @model_validator(mode="before")
    @classmethod
    def _accept_shorthand(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, (Mapping, BaseModel)):
            return value
        return cls.from_shorthand(value)

    def as_json(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as JSON values."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_SELECTS = BeforeValidator(_one_or_many)

ModuleSelectors = Annotated[tuple[str, ...], _SELECTS]
"""Modules by class name, qualified class name, or dotted path with ``*``; a single string is one of them."""


def selector_keys(config: type[BaseModel]) -> list[str]:
    """The keys of a config that select modules: the fields that are :data:`ModuleSelectors`, or that or None."""

    def selects(field: FieldInfo) -> bool:
        parts = [field.metadata, *(getattr(part, "__metadata__", ()) for part in get_args(field.annotation))]
        return any(_SELECTS in part for part in parts)

    return [key for key, field in config.model_fields.items() if selects(field)]


_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}
_KNOWN_DTYPES = ("float16", "bfloat16", "float32")


def dtype_name(value: Any) -> str:
    """The torch name of a floating dtype written as ``"bf16"``, ``"torch.bfloat16"`` or ``"bfloat16"``.

    Raises:
        ValueError: for anything else.
    """
    name = str(value).removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if name not in _KNOWN_DTYPES:
        raise ValueError(f"{value!r} is no dtype here; accepted: fp16, bf16, fp32 or their torch names")
    return name
