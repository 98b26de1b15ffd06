"""Nests: tuples, lists, mappings and dataclass instances with tensors at leaves; batches and their sizes.

Mappings need not be a ``dict``: transformers' ``BatchEncoding`` is one. Classes registered with
``torch.utils._pytree`` are walked as registered. A tensor is always a leaf.

Legend: B samples, T tokens in each.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from atorch_ns.torch_compat import registered_children

Path = tuple[Any, ...]
"""Keys, positions and field names from the outermost container to a leaf."""

_Children = tuple[Sequence[tuple[Any, Any]], Callable[[Sequence[Any]], Any]]


def never(_: Any) -> bool:
    """Returns False: the default ``is_leaf``, which enters every container."""
    return False


def leaves(nest: Any, *, is_leaf: Callable[[Any], bool] = never) -> Iterator[tuple[Path, Any]]:
    """The leaves of a nest with their paths, in order.

    Args:
        nest: any value; one that is not a container is its own leaf, at the path ``()``.
        is_leaf: predicate of containers that are not entered.
    """
    container = None if is_leaf(nest) else _open_container(nest)
    if container is None:
        yield (), nest
        return
    for key, value in container[0]:
        for path, leaf in leaves(value, is_leaf=is_leaf):
            yield (key, *path), leaf


def map_leaves(
    function: Callable[[Path, Any], Any], nest: Any, *, is_leaf: Callable[[Any], bool] = never
) -> Any:
    """A nest of the same structure with ``function(path, leaf)`` in place of every leaf, visited in order."""
    return _map_with_path(function, nest, is_leaf, ())


def _map_with_path(
    function: Callable[[Path, Any], Any], nest: Any, is_leaf: Callable[[Any], bool], path: Path
) -> Any:
    container = None if is_leaf(nest) else _open_container(nest)
    if container is None:
        return function(path, nest)
    items, rebuilt = container
    return rebuilt([_map_with_path(function, value, is_leaf, (*path, key)) for key, value in items])


def map_instances(kind: type, function: Callable[[Any], Any], nest: Any) -> Any:
    """A nest of equal structure, with ``function(value)`` for instances of ``kind`` and its other leaves."""
    return map_leaves(
        lambda _, leaf: function(leaf) if isinstance(leaf, kind) else leaf,
        nest,
        is_leaf=lambda value: isinstance(value, kind),
    )


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """A nest of the same structure with ``function(tensor)`` in place of every tensor."""
    return map_instances(torch.Tensor, function, nest)


def floats_to(nest: Any, dtype: torch.dtype) -> Any:
    """A nest of the same structure with every floating tensor in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, nest)


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """The tensors of a nest, in order. A tensor in several places is repeated."""
    tensors: list[torch.Tensor] = []
    _collect_tensors(nest, tensors)
    return tensors


def unique_tensors_of(nest: Any) -> list[torch.Tensor]:
    """The tensors of a nest, in order, each once."""
    return list({id(tensor): tensor for tensor in tensors_of(nest)}.values())


def samples_and_tokens(batch: Any) -> tuple[int, int]:
    """(B, T): dim 0 of the first tensor with dims, and dim 1 of the first [B, T] tensor of integers, or 1."""
    with_dims = [tensor for tensor in unique_tensors_of(batch) if tensor.dim()]
    num_samples = with_dims[0].shape[0] if with_dims else 1
    for tensor in with_dims:
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[0] == num_samples:
            return num_samples, tensor.shape[1]
    return num_samples, 1


def resized_shape(
    shape: tuple[int, ...], sizes: tuple[int, int], new_sizes: tuple[int, int]
) -> tuple[int, ...]:
    """A tensor's shape with B in dim 0 and T in later dims replaced; unchanged without B in dim 0.

    Args:
        sizes, new_sizes: (B, T) of its batch, and the new (B, T).
    """
    (num_samples, num_tokens), (new_samples, new_tokens) = sizes, new_sizes
    if not shape or shape[0] != num_samples:
        return shape
    rest = (new_tokens if num_tokens > 1 and size == num_tokens else size for size in shape[1:])
    return (new_samples, *rest)


def resize(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A copy of ``tensor`` with each dim cut or repeated to the sizes of ``shape``."""
    for dim, size in enumerate(shape):
        if size != tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor.clone(memory_format=torch.contiguous_format)


def resized_batch(batch: Any, sizes: tuple[int, int], new_sizes: tuple[int, int]) -> Any:
    """A copy of a batch of (B, T), cut or repeated to new sizes."""
    return map_tensors(
        lambda tensor: resize(tensor, resized_shape(tuple(tensor.shape), sizes, new_sizes)), batch
    )


def num_rows(batch: Any) -> int | None:
    """The size of dim 0 of a batch's tensors; ``None`` if they do not share one."""
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def batch_sizes(data: Any) -> frozenset[int]:
    """The sizes of dim 0 of all tensors and arrays with dims in a batch."""
    entries = [leaf for _, leaf in leaves(data, is_leaf=is_unsplittable)]
    shapes = [getattr(leaf, "shape", None) for leaf in entries]
    sizes = {int(shape[0]) for shape in shapes if isinstance(shape, tuple) and shape}
    return frozenset(
        sizes | {len(leaf) for leaf in entries if is_unsplittable(leaf) and hasattr(leaf, "__len__")}
    )


def can_move(value: Any) -> bool:
    """Whether the value can be moved to a device."""
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def is_unsplittable(value: Any) -> bool:
    """Whether the value holds device data in a special form, such as a packed sequence."""
    return can_move(value) and not isinstance(value, (torch.Tensor, Mapping))


def path_text(path: Path) -> str:
    """An argument's name from its path within ``(args, kwargs)``: ``"mask"``, ``"argument 0['x']"``."""
    _, *keys = path
    head, *rest = keys or [""]
    text = str(head) if isinstance(head, str) else f"argument {head}"
    return text + "".join(f"[{key!r}]" for key in rest)


_PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def can_be_written(value: Any) -> bool:
    """Whether a call may change a non-tensor argument, such as a list, dictionary or cache object."""
    if isinstance(value, tuple):
        return any(map(can_be_written, value))
    return not (isinstance(value, _PLAIN) or callable(value))


def copied_state(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy of an argument that shares tensors, functions and modules."""
    memo = {} if memo is None else memo
    if not can_be_written(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [copied_state(item, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    try:
        clone = memo[id(value)] = copy.copy(value)  # before its items, which may refer to it
    except Exception:  # a class may refuse to be copied: then the object itself is used
        return value
    if isinstance(value, list):
        clone[:] = [copied_state(item, memo) for item in value]
    elif isinstance(value, dict):
        clone.update({key: copied_state(item, memo) for key, item in value.items()})
    attributes = getattr(clone, "__dict__", None)
    if isinstance(attributes, dict):
        attributes.update({name: copied_state(item, memo) for name, item in attributes.items()})
    return clone


def is_dataclass_instance(value: Any) -> bool:
    """Whether a value is an instance of a dataclass, not the class."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _collect_tensors(nest: Any, tensors: list[torch.Tensor]) -> None:
    # Without paths: this is the most frequent walk.
    if isinstance(nest, torch.Tensor):
        tensors.append(nest)
    elif isinstance(nest, (tuple, list)):
        for item in nest:
            _collect_tensors(item, tensors)
    elif (container := _open_container(nest)) is not None:
        for _, item in container[0]:
            _collect_tensors(item, tensors)


def _open_container(nest: Any) -> _Children | None:
    """Items of a container by key, and a function that rebuilds it from others; ``None`` for a leaf."""
    if isinstance(nest, torch.Tensor):
        return None
    if isinstance(nest, Mapping):
        return list(nest.items()), partial(_as_mapping, nest)
    if isinstance(nest, (tuple, list)):  # also named tuples
        return list(enumerate(nest)), nest._make if hasattr(nest, "_make") else type(nest)
    if is_dataclass_instance(nest):
        names = [field.name for field in dataclasses.fields(nest) if hasattr(nest, field.name)]
        return [(name, getattr(nest, name)) for name in names], partial(_as_dataclass, nest, names)
    children = registered_children(nest)
    return None if children is None else (list(enumerate(children[0])), children[1])


def _as_mapping(nest: Mapping[Any, Any], values: Sequence[Any]) -> Any:
    items = dict(zip(nest, values, strict=True))
    if type(nest) is dict or not isinstance(nest, MutableMapping):  # rebuilt as a plain dict
        return items
    mapping = copy.copy(nest)  # keeps its other attributes, as of a BatchEncoding
    for key, value in items.items():
        mapping[key] = value
    return mapping


def _as_dataclass(nest: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    instance = copy.copy(nest)  # not `replace`, which would run __post_init__ again
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # frozen ones too
    return instance
