"""What happens to a batch between the loader and the model: moved, split, passed.

A batch is any nest of dictionaries, lists, tuples, named tuples and dataclass instances with tensors
at its leaves. Legend: B the size of dim 0 that all its tensors share.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch

from atorch_ns.data._forward import taken_items
from atorch_ns.data._sizes import nearest_sizes
from atorch_ns.errors import BatchSizeError, InputError

__all__ = [
    "batch_sizes",
    "call_model",
    "check_model_input_format",
    "default_prepare_input",
    "split_batch",
]

ModelInputFormat = Literal["unpack_sequence", "unpack_dict", "first"]
_FORMATS: tuple[ModelInputFormat, ...] = ("unpack_sequence", "unpack_dict", "first")


def default_prepare_input(data: Any, device: torch.device | str) -> Any:
    """``data`` with every tensor on ``device``; all else, and ``data`` itself, stays as it is.

    Copies from pinned memory do not block. An object with a ``to`` of its own (a packed sequence, the
    batch encoding of a tokenizer) is moved by that, on a shallow copy.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=leaf.device.type == "cpu" and leaf.is_pinned())
        duplicate = copy.copy(leaf)  # some `to` methods change the object they are called on
        moved = duplicate.to(device)
        return duplicate if moved is None else moved

    return _rebuild(data, lambda leaf: move(leaf) if _has_to(leaf) else leaf, opaque=_has_to)


def check_model_input_format(value: object) -> ModelInputFormat | None:
    """``value``, if it is a known ``model_input_format``.

    Raises:
        InputError: it is not; the message lists what is, nearest first.
    """
    if value is None:
        return None
    for known in _FORMATS:
        if value == known:
            return known
    near = difflib.get_close_matches(str(value), _FORMATS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InputError(
        f"model_input_format={value!r} is not known.{hint} "
        "Use None for model(data), 'unpack_sequence' for model(*data), 'unpack_dict' for model(**data) with the keys that forward names, "
        "'first' for model(data[0])."
    )


def call_model(model: Callable[..., Any], data: Any, model_input_format: str | None) -> Any:
    """The model's output for ``data``, passed as ``model_input_format`` says.

    Of a dictionary that is unpacked, the keys that the model's ``forward`` names are passed, and all of them where
    it has ``**kwargs``.

    Raises:
        InputError: an unknown format, or data that it does not fit.
    """
    known = check_model_input_format(model_input_format)
    if known is None:
        try:
            return model(data)
        except (TypeError, AttributeError) as error:
            if isinstance(data, (Mapping, list, tuple)):
                error.add_note(_as_it_is(data))
            raise
    if known in ("unpack_sequence", "first"):
        if not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
            raise _misfit(known, "a list or tuple", data)
        if known == "unpack_sequence":
            return model(*data)
        if not data:
            raise _misfit(known, "a list or tuple with an item", data)
        return model(data[0])
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise _misfit(known, "a dictionary with strings as keys", data)
    return model(**taken_items(model, data))


def split_batch(data: Any, num_micro_batches: int) -> list[Any]:
    """``data`` as that many equal parts, in order: part k has rows ``[k*B/n, (k+1)*B/n)``.

    Tensors are split along dim 0 into views. A list of B plain values (one that holds no tensor and no
    nested batch) is split too. Tensors without dims and everything else are repeated in each part.

    Raises:
        BatchSizeError: n does not divide B, the tensors differ in B, or there is no tensor to split.
        InputError: ``num_micro_batches`` is not a positive integer, or the batch holds an object that
            can be moved to a device but that nobody knows how to split.
    """
    num = num_micro_batches
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise InputError(f"the number of micro-batches must be a positive integer; it is {num!r}.")
    if num == 1:
        return [data]
    size = _common_size(data)
    if size % num:
        raise BatchSizeError(
            f"a batch of {size} rows per rank cannot be split into {num} equal micro-batches. "
            f"{nearest_sizes(size, num)}"
        )
    step = size // num

    def part(begin: int) -> Any:
        def select(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return leaf.narrow(0, begin, step) if leaf.dim() else leaf
            return leaf[begin : begin + step] if _is_plain_list(leaf) and len(leaf) == size else leaf

        return _rebuild(data, select, opaque=_is_plain_list)

    return [part(begin) for begin in range(0, size, step)] if step else [data] * num


def batch_sizes(data: Any) -> frozenset[int]:
    """The sizes of dim 0 of all tensors and arrays in a batch; those without dims say none."""
    leaves = [leaf for _, leaf in _leaves(data, "batch")]
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    sizes = {int(shape[0]) for shape in shapes if isinstance(shape, tuple) and shape}
    return frozenset(
        sizes | {len(leaf) for leaf in leaves if _is_unsplittable(leaf) and hasattr(leaf, "__len__")}
    )


def _as_it_is(data: Any) -> str:
    how = "unpack_dict" if isinstance(data, Mapping) else "unpack_sequence"
    return (
        f"The model was called with the whole batch, a {type(data).__name__}, as model_input_format=None has it. If "
        f"forward takes its items, pass model_input_format={how!r}."
    )


def _misfit(model_input_format: str, wanted: str, data: Any) -> InputError:
    return InputError(
        f"model_input_format={model_input_format!r} needs each batch to be {wanted}, but the data is "
        f"{_describe(data)}. Use another model_input_format, or return {wanted} from prepare_input."
    )


def _describe(data: Any) -> str:
    kind = type(data).__name__
    if isinstance(data, torch.Tensor):
        return f"a {kind} of shape {tuple(data.shape)}"
    if isinstance(data, Mapping):
        return f"a {kind} with the keys {[key for key, _ in zip(data, range(8), strict=False)]}"
    if isinstance(data, (list, tuple)):
        return f"a {kind} of {len(data)} items"
    return f"a {kind}"


def _has_to(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or _is_dataclass_instance(value)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and not any(
        isinstance(item, torch.Tensor) or _is_container(item) or _has_to(item) for item in value
    )


def _rebuild(data: Any, leaf: Callable[[Any], Any], *, opaque: Callable[[Any], bool]) -> Any:
    """``data`` with ``leaf`` applied to all that is no container, and to containers that are opaque."""
    if isinstance(data, torch.Tensor) or opaque(data) or not _is_container(data):
        return leaf(data)
    if isinstance(data, Mapping):
        items = {key: _rebuild(value, leaf, opaque=opaque) for key, value in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return items
        same_type = copy.copy(data)
        for key, value in items.items():
            same_type[key] = value
        return same_type
    if isinstance(data, (list, tuple)):
        parts = [_rebuild(value, leaf, opaque=opaque) for value in data]
        return data._make(parts) if hasattr(data, "_make") else type(data)(parts)
    same_type = copy.copy(data)  # not `replace`: that would run __post_init__ again
    for field in dataclasses.fields(data):
        if hasattr(data, field.name):
            value = _rebuild(getattr(data, field.name), leaf, opaque=opaque)
            object.__setattr__(same_type, field.name, value)  # frozen ones too
    return same_type


def _is_unsplittable(value: Any) -> bool:
    """Whether it holds data for a device in a form of its own, such as a packed sequence."""
    return _has_to(value) and not isinstance(value, (torch.Tensor, Mapping))


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, torch.Tensor) or _is_unsplittable(data) or not _is_container(data):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        for field in dataclasses.fields(data):
            if hasattr(data, field.name):
                yield from _leaves(getattr(data, field.name), f"{path}.{field.name}")


def _common_size(data: Any) -> int:
    """B, the size of dim 0 of every tensor in ``data`` that has dims."""
    sizes: dict[int, str] = {}
    for path, leaf in _leaves(data, "batch"):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim():
                sizes.setdefault(leaf.shape[0], path)
        elif _is_unsplittable(leaf):
            raise InputError(
                f"{path} is a {type(leaf).__name__}, which cannot be split into micro-batches. "
                "Turn it into tensors in prepare_input, or use one micro-batch."
            )
    if not sizes:
        raise BatchSizeError(
            f"there is no tensor to split into micro-batches: the data is {_describe(data)}."
        )
    if len(sizes) > 1:
        found = ", ".join(f"{path} has {size} rows" for size, path in sizes.items())
        raise BatchSizeError(
            f"the tensors of a batch differ in dim 0, so it cannot be split into micro-batches: {found}."
        )
    return next(iter(sizes))
