"""Profiles as JSON, so that planning needs neither the model nor its packages."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from atorch_ns.capture.blocks import class_names, fingerprint, repeated_blocks
from atorch_ns.errors import InputError
from atorch_ns.profile.trace import Trace
from atorch_ns.text import clip_text


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The structure of a model.

    Attributes:
        model_class: qualified name of the model's class.
        module_classes: class names of every module by path, bare and qualified, bases included.
        blocks: paths of the repeated blocks.
        block_class: bare class name of the repeated blocks, empty if there are none or several.
        num_parameters: number of parameter elements, tied ones once.
        num_trainable: the number of those that require gradients.
        fingerprint: digest of structure, shapes and settings, independent of the weights.
        trace: the cost of one step; ``None`` if only the structure was read.
    """

    model_class: str
    module_classes: dict[str, tuple[str, ...]]
    blocks: tuple[str, ...]
    block_class: str
    num_parameters: int
    num_trainable: int
    parameter_dtypes: tuple[str, ...]
    fingerprint: str = ""
    trace: Trace | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Profile:
        """Reads the structure of ``model``; nothing is run or changed."""
        parameters = list(model.parameters())
        blocks = repeated_blocks(model)
        kinds = {type(block.module).__name__ for block in blocks}
        return cls(
            model_class=f"{type(model).__module__}.{type(model).__qualname__}",
            module_classes={
                name: tuple(sorted(class_names(module))) for name, module in model.named_modules() if name
            },
            blocks=tuple(block.name for block in blocks),
            block_class=kinds.pop() if len(kinds) == 1 else "",
            num_parameters=sum(parameter.numel() for parameter in parameters),
            num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            parameter_dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            fingerprint=fingerprint(model),
        )

    def to_json(self) -> str:
        """The profile as one line of JSON, without the model's weights or the batch's values."""
        return dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Reads a profile that :meth:`to_json` wrote.

        Raises:
            InputError: if the text is not a profile, or one of another schema.
        """
        return loads(cls, text)

    def unmatched(self, selectors: Iterable[str]) -> list[str]:
        """The selectors that match no module."""
        modules = self.module_classes.items()
        return [
            selector
            for selector in selectors
            if not any(
                selector in classes or fnmatch.fnmatchcase(path, selector) for path, classes in modules
            )
        ]

    def namesakes(self, selector: str) -> tuple[str, tuple[str, ...]]:
        """The model's classes with the same name as ``selector``, in any Python module.

        Args:
            selector: ``package.module.Name``.

        Returns:
            The qualified name that they share, without the module, and their full names, sorted. Both are
            empty without such a class, or if the name is a path or a pattern.
        """
        everything = set().union(*self.module_classes.values())
        tails = {name for name in everything if selector.endswith(f".{name}")}
        if not tails or "*" in selector:
            return "", ()
        tail = max(tails, key=len)
        names = {
            name
            for classes in self.module_classes.values()
            for name in classes
            if name.endswith(f".{tail}") and not any(other.endswith(f".{name}") for other in classes)
        }
        return tail, tuple(sorted(names))

    def own_class_names(self) -> list[str]:
        """Bare class names of the model's modules whose classes belong to torch or the user's code."""
        names = {name for classes in self.module_classes.values() for name in classes if "." not in name}
        return sorted(names)


SCHEMA = 3
"""Version of the form of a profile's JSON; another is refused."""

_T = TypeVar("_T")


def dumps(value: Any) -> str:
    """A dataclass instance as JSON with its schema; equal instances give equal text."""
    return json.dumps({"schema": SCHEMA, **_to_plain_data(value)}, sort_keys=True, separators=(",", ":"))


def loads(kind: type[_T], text: str | bytes) -> _T:
    """Reads an instance of ``kind`` that :func:`dumps` wrote.

    Raises:
        InputError: if the text is not JSON, has another schema, or does not hold what ``kind`` needs.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        data = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"the profile is not JSON: {error}. Write it again with Profile.to_json()."
        ) from error
    if not isinstance(data, dict) or "schema" not in data:
        raise InputError(f"the profile must be an object with a 'schema'; it is {clip_text(repr(data), 60)}.")
    schema = data.pop("schema")
    if schema != SCHEMA:
        raise InputError(
            f"the profile has schema {schema!r}, but this version reads {SCHEMA}. Profile the model again."
        )
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        raise InputError(
            f"the profile cannot be read: {location or 'its root'}: {first['msg']} "
            f"({error.error_count()} problems). Profile the model again."
        ) from error


def _to_plain_data(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _to_plain_data(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain_data(item) for item in value]
    return value
