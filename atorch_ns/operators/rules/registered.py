"""Registered functions at work: their schemas, and what their operators compute, on real tensors and in a capture.

Where a capture cannot look into a function, as its code decides by values, the annotation gives the shapes of the results, and
the first float argument their dtype.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.errors import InputError
from atorch_ns.operators.graph.graph import spec_of
from atorch_ns.operators.rules.annotation import Annotation, Shape
from atorch_ns.operators.rules.rule import TensorSpec
from atorch_ns.text import counted, error_line, with_article
from atorch_ns.torch_compat import fake_tensor_mode, fake_tensor_type, quiet_fake_kernels, sample_size

Annotating = str | Callable[..., str]
"""An annotation, or a function of a call's arguments that gives it."""


@dataclass(frozen=True, eq=False)
class Entry:
    """An operator with its annotation, and the function that it runs; ``None`` for an operator of torch."""

    name: str
    annotation: Annotating
    function: Callable[..., Any] | None = None

    @functools.cached_property
    def parameters(self) -> Sequence[inspect.Parameter]:
        """The function's parameters."""
        assert self.function is not None
        return tuple(signature_of(self.function).parameters.values())

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """The values of the function's parameters, by name."""
        return dict(zip((one.name for one in self.parameters), values, strict=True))

    def annotation_of(self, values: Mapping[str, Any]) -> Annotation:
        """The annotation of a call with these arguments.

        A function that gives it takes meta tensors for tensors, arguments without a default by place, and others by name.

        Raises:
            InputError: if the text is no annotation.
        """
        if isinstance(self.annotation, str):
            return Annotation.read(self.annotation)
        named = (
            {one.name for one in self.parameters if one.default is not one.empty} if self.function else set()
        )
        text = self.annotation(
            *(_on_meta(value) for name, value in values.items() if name not in named),
            **{name: _on_meta(value) for name, value in values.items() if name in named},
        )
        if not isinstance(text, str):
            raise InputError(f"the annotation's function gives {with_article(text)} in place of text.")
        return Annotation.read(text)

    def call(self, values: Sequence[Any]) -> Any:
        """What the function returns for the values of its parameters."""
        assert self.function is not None
        pairs = list(zip(self.parameters, values, strict=True))
        by_name = {one.name: value for one, value in pairs if one.kind == one.KEYWORD_ONLY}
        return self.function(*(value for one, value in pairs if one.kind != one.KEYWORD_ONLY), **by_name)


def _on_meta(value: Any) -> Any:
    if isinstance(value, (TensorSpec, torch.Tensor)):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return [_on_meta(item) for item in value] if isinstance(value, (tuple, list)) else value


def is_autograd(target: object) -> bool:
    """Whether a value is a class of ``torch.autograd.Function``."""
    return isinstance(target, type) and issubclass(target, torch.autograd.Function)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters by which a function's operator is called."""
    owner = getattr(function, "__self__", None)
    if is_autograd(owner):
        _, *rest = inspect.signature(owner.forward).parameters.values()  # type: ignore[union-attr]
        return inspect.Signature(rest)
    return inspect.signature(function)


def shape_of(value: object) -> Shape | None:
    """The shape of a tensor; ``None`` for other values."""
    return tuple(value.shape) if isinstance(value, (TensorSpec, torch.Tensor)) else None


def sizes_of(annotation: Annotation, named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are sizes of names of the annotation."""
    marks = annotation.marks
    return {
        name: value
        for name, value in named.items()
        if name in marks and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    }


_TYPES: Final[tuple[tuple[Any, str], ...]] = (
    (torch.Tensor, "Tensor"),
    (bool, "bool"),
    ((int, torch.SymInt), "SymInt"),
    (float, "float"),
    (str, "str"),
    (torch.dtype, "ScalarType"),
    (torch.device, "Device"),
)


def schema_type(operator: str, parameter: str, value: object) -> str:
    """The type that a schema gives an argument.

    Raises:
        InputError: if no operator can take it.
    """
    if value is None:
        return "Tensor?"
    if isinstance(value, (tuple, list)):
        kinds = {schema_type(operator, parameter, item) for item in value} or {"SymInt"}
        if len(kinds) == 1 and not (kind := kinds.pop()).endswith(("?", "]")):
            return f"{kind}[]"
    found = next((name for kind, name in _TYPES if isinstance(value, kind)), None)
    if found is None:
        raise InputError(
            f"{parameter} of {operator} is {with_article(value)}, which no operator can take. Pass tensors, numbers, texts, "
            "None, or lists of one of them."
        )
    return found


def run(entry: Entry, values: Sequence[Any], num_results: int) -> Any:
    """What a registered function computes, as new tensors.

    Raises:
        InputError: if it returns something else, or a capture sees it write to its arguments.
    """
    tensors = tensors_of(values)
    captured = any(isinstance(tensor, fake_tensor_type()) for tensor in tensors)
    error = _needs_values(entry, values) if captured else None
    if error is not None:
        return _by_annotation(entry, values, error)
    versions = [tensor._version for tensor in tensors] if captured else []
    results = entry.call(values)
    if versions != [tensor._version for tensor in tensors if captured]:
        raise InputError(f"{entry.name} writes to its arguments. Let it return new tensors instead.")
    given = [results] if num_results == 1 else results
    if (
        not isinstance(given, (tuple, list))
        or [isinstance(one, torch.Tensor) for one in given] != [True] * num_results
    ):
        raise InputError(
            f"{entry.name} returns {with_article(results)}, but by its annotation it returns {counted(num_results, 'tensor')}. "
            "Correct the annotation, and return what is no tensor elsewhere."
        )
    taken = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
    made = [one.clone() if StorageWeakRef(one.untyped_storage()) in taken else one for one in given]
    return made[0] if num_results == 1 else tuple(made)


def _needs_values(entry: Entry, values: Sequence[Any]) -> Exception | None:
    """The error with which a function ends that looks at the values of tensors; ``None`` for others."""
    plain = [sample_size(value, 1) if isinstance(value, torch.SymInt) else value for value in values]
    with fake_tensor_mode(), quiet_fake_kernels():
        tensors = map_tensors(
            lambda one: torch.empty(spec_of(one).shape, dtype=one.dtype, device=one.device), plain
        )
        try:
            entry.call(tensors)
        except Exception as error:
            return error
    return None


def _by_annotation(entry: Entry, values: Sequence[Any], error: Exception) -> Any:
    named = entry.named(values)
    annotation = entry.annotation_of(named)
    taken = [shape_of(value) for value in named.values()][: len(annotation.inputs)]
    shapes = annotation.shapes(taken, **sizes_of(annotation, named))
    tensors = tensors_of(values)
    if None in shapes:
        raise InputError(
            f"{entry.name} cannot be captured ({error_line(error)}), and its annotation {annotation.text!r} leaves the shape of a "
            "result open. Write the dimensions of all results."
        ) from error
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
    learnt = (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and like.is_floating_point()
    )
    made = [like.detach().new_empty(shape).requires_grad_(learnt) for shape in shapes if shape is not None]
    return made[0] if len(made) == 1 else tuple(made)
