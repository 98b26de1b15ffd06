"""Batches between the loader and the model: moved to a device, split, and passed to forward.

A batch is a nest of dictionaries, lists, tuples, named tuples and dataclass instances with tensors
at its leaves. Legend: B the size of dim 0 that all its tensors share.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import nn

from atorch_ns.capture.nests import Path, can_move, is_dataclass_instance, is_unsplittable, leaves, map_leaves
from atorch_ns.data.samplers import nearest_sizes
from atorch_ns.errors import BatchSizeError, InputError
from atorch_ns.text import did_you_mean, with_article

_log = logging.getLogger(__name__)

# Names of the wrapped model in torch.compile, FSDP1, checkpoint_wrapper, and DDP or an engine.
_WRAPPED_AS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_WRAPPERS: Final = ("torch", "deepspeed", "peft", "atorch_ns", "opt_lib")  # packages whose modules wrap
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _ForwardNames(NamedTuple):
    """Argument names of a ``forward`` (``None``: any name) and the groups of other keys that were logged."""

    names: frozenset[str] | None
    logged: set[tuple[str, ...]]


_FORWARD_NAMES: Final[weakref.WeakKeyDictionary[Any, _ForwardNames]] = weakref.WeakKeyDictionary()


def taken_items(model: Callable[..., Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The items of ``data`` that the model's ``forward`` names, or all if it has ``**kwargs``.

    Wrappers (DDP, FSDP, compiled modules, engines) are unwrapped. All items are passed if the
    signature cannot be read. It is read once. Omitted keys are logged once, at info level.
    """
    names, logged_keys = _forward_names(model)
    if names is None or names.issuperset(data):
        return data
    left_out = tuple(key for key in data if key not in names)
    if left_out not in logged_keys:
        logged_keys.add(left_out)
        _log.info(
            "%s of the batch are not passed to the model: forward of %s does not take them. The loss is given the "
            "whole batch.",
            ", ".join(map(repr, left_out)),
            type(user_module(model)).__name__,
        )
    return {key: value for key, value in data.items() if key in names}


def forward_signature(model: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of the user's ``forward`` without ``self``, or ``None`` if it cannot be read."""
    try:
        return inspect.signature(_forward_callable(model))
    except (TypeError, ValueError):  # a forward that is not written in Python
        return None


def _forward_names(model: Callable[..., Any]) -> _ForwardNames:
    forward = _forward_callable(model)
    # A bound method is another object at each access, so its function is the key.
    key = forward.func if isinstance(forward, functools.partial) else getattr(forward, "__func__", forward)
    try:
        return _FORWARD_NAMES[key]
    except (KeyError, TypeError):  # not seen before, or not weakly referenceable
        names = _ForwardNames(_parameter_names(forward_signature(model)), set())
    with contextlib.suppress(TypeError):
        _FORWARD_NAMES[key] = names
    return names


def _parameter_names(signature: inspect.Signature | None) -> frozenset[str] | None:
    if signature is None:
        return None
    parameters = signature.parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters if each.kind in _BY_NAME)


def _forward_callable(model: Callable[..., Any]) -> Callable[..., Any]:
    inside = user_module(model)
    return inside.forward if isinstance(inside, nn.Module) else inside


def user_module(model: Any) -> Any:
    """The user's module inside library wrappers. A wrapper written by the user is the user's module."""
    while isinstance(model, nn.Module):
        forward = type(model).forward
        package = (getattr(forward, "__module__", None) or "").partition(".")[0]
        if package not in _WRAPPERS or not _is_variadic(forward):  # layers of torch name their arguments
            return model
        base = getattr(model, "get_base_model", None)  # peft's
        inner = base() if callable(base) else _find_wrapped_model(model)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner
    return model


def _find_wrapped_model(model: nn.Module) -> Any:
    return next((getattr(model, name) for name in _WRAPPED_AS if name in model._modules), None)


def _is_variadic(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))


ModelInputFormat = Literal["unpack_sequence", "unpack_dict", "first", "unpack_first"]
_FORMATS: tuple[ModelInputFormat, ...] = get_args(ModelInputFormat)


def default_prepare_input(data: Any, device: torch.device | str) -> Any:
    """``data`` with all tensors on ``device``. Other values are shared, and ``data`` itself is not changed.

    Copies from pinned memory do not block. An object with its own ``to`` (a packed sequence, the batch
    encoding of a tokenizer) is moved by ``to``, on a shallow copy.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=leaf.device.type == "cpu" and leaf.is_pinned())
        duplicate = copy.copy(leaf)  # some `to` methods change the object they are called on
        result = duplicate.to(device)
        return duplicate if result is None else result

    return map_leaves(lambda _, leaf: move(leaf) if can_move(leaf) else leaf, data, is_leaf=can_move)


def check_model_input_format(value: object) -> ModelInputFormat | None:
    """Checks a ``model_input_format``.

    Raises:
        InputError: for an unknown format. The message lists the known ones, nearest first.
    """
    if value is None or value in _FORMATS:
        return value
    raise InputError(
        f"model_input_format={value!r} is not known.{did_you_mean(str(value), _FORMATS)} "
        "Use None for model(data), 'unpack_sequence' for model(*data), 'unpack_dict' for model(**data) with the keys that forward names, "
        "'first' for model(data[0]), 'unpack_first' for model(**data[0])."
    )


def call_model(model: Callable[..., Any], data: Any, model_input_format: str | None) -> Any:
    """The model's output for ``data``, passed according to ``model_input_format``.

    If a dictionary is unpacked, only its :func:`taken_items` are passed.

    Raises:
        InputError: for an unknown format, or data that does not fit it.
    """
    form = check_model_input_format(model_input_format)
    if form is None:
        try:
            return model(data)
        except (TypeError, AttributeError) as error:
            if isinstance(data, (Mapping, list, tuple)):
                how = "unpack_dict" if isinstance(data, Mapping) else "unpack_sequence"
                error.add_note(
                    f"The model was called with the whole batch, {with_article(data)}, as model_input_format=None "
                    f"has it. If forward takes its items, pass model_input_format={how!r}."
                )
            raise
    if form != "unpack_dict":
        if not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
            raise _misfit_error(form, "a list or tuple", data)
        if form == "unpack_sequence":
            return model(*data)
        if not data:
            raise _misfit_error(form, "a non-empty list or tuple", data)
        return model(data[0]) if form == "first" else call_model(model, data[0], "unpack_dict")
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise _misfit_error(form, "a dictionary with string keys", data)
    return model(**taken_items(model, data))


def call_arguments(
    model: nn.Module, data: Any, model_input_format: str | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keywords for the model in :func:`call_model`. Raises the same errors."""

    @functools.wraps(model.forward)
    def arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    result: tuple[tuple[Any, ...], dict[str, Any]] = call_model(arguments, data, model_input_format)
    return result


def split_batch(data: Any, num_micro_batches: int, *, uneven: bool = False) -> list[Any]:
    """``data`` as equal parts in order: part k has rows ``[k*B/n, (k+1)*B/n)``.

    With ``uneven``, n need not divide B. Parts have B/n rows, rounded up, and the last part has the rest.

    Tensors are split along dim 0 into views. Lists of B plain values (without tensors and nested batches) are
    also split. Tensors without dims and all other values are repeated in each part.

    Raises:
        BatchSizeError: n does not divide B, the tensors differ in B, or there is no tensor to split.
        InputError: ``num_micro_batches`` is not a positive integer, or the batch holds an object with its own
            ``to`` and no known parts, such as a packed sequence.
    """
    num = num_micro_batches
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise InputError(f"the number of micro-batches must be a positive integer; it is {num!r}.")
    if num == 1:
        return [data]
    size = _common_size(data)
    if size % num and not uneven:
        raise BatchSizeError(
            f"a batch of {size} rows per rank cannot be split into {num} equal micro-batches. "
            f"{nearest_sizes(size, num)} These are rows of one data rank; batch_size counts those of all."
        )
    step = -(-size // num)  # rounded up

    def part(begin: int) -> Any:
        def select(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return leaf[begin : begin + step] if leaf.dim() else leaf
            return leaf[begin : begin + step] if _is_plain_list(leaf) and len(leaf) == size else leaf

        return map_leaves(lambda _, leaf: select(leaf), data, is_leaf=_is_plain_list)

    # An empty batch has no rows to divide: each part is the batch.
    return [part(begin) for begin in range(0, size, step)] if step else [data] * num


def _misfit_error(model_input_format: str, kind: str, data: Any) -> InputError:
    return InputError(
        f"model_input_format={model_input_format!r} needs each batch to be {kind}, but the data is "
        f"{_describe_data(data)}. Use another model_input_format, or return {kind} from prepare_input."
    )


def _describe_data(data: Any) -> str:
    kind = with_article(data)
    if isinstance(data, torch.Tensor):
        return f"{kind} of shape {tuple(data.shape)}"
    if isinstance(data, Mapping):
        return f"{kind} with the keys {[key for key, _ in zip(data, range(8), strict=False)]}"
    if isinstance(data, (list, tuple)):
        return f"{kind} of {len(data)} items"
    return kind


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or is_dataclass_instance(value)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and not any(
        isinstance(item, torch.Tensor) or _is_container(item) or can_move(item) for item in value
    )


def _access_text(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _common_size(data: Any) -> int:
    sizes: dict[int, str] = {}  # each B, and the first tensor that has it
    for path, leaf in leaves(data, is_leaf=is_unsplittable):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim():
                sizes.setdefault(leaf.shape[0], _access_text(path))
        elif is_unsplittable(leaf):
            raise InputError(
                f"{_access_text(path)} is {with_article(leaf)}, which cannot be split into micro-batches. "
                "Turn it into tensors in prepare_input, or use one micro-batch."
            )
    if not sizes:
        raise BatchSizeError(
            f"the data holds no tensor to split into micro-batches: it is {_describe_data(data)}."
        )
    if len(sizes) > 1:
        details = ", ".join(f"{path} has {size} rows" for size, path in sizes.items())
        raise BatchSizeError(
            f"the tensors of a batch differ in dim 0, so it cannot be split into micro-batches: {details}."
        )
    return next(iter(sizes))
