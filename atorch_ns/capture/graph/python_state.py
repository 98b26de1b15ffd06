"""Python state of a model: what its code reads beside arguments, and effects that a graph cannot repeat."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from atorch_ns.torch_compat import plain_name, refusing_autograd_functions, unwrap_checkpoint

_OF_MODULES = frozenset((*vars(nn.Module()), "training"))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_MISSING = object()
_OURS = ("torch.", "atorch_ns.", "opt_lib.")  # where the hooks that methods register come from


class UnrepeatableError(Exception):
    """An effect of the model's code that a graph would not repeat."""


class ChangedError(UnrepeatableError):
    """A forward pass has changed attributes, perhaps only once on the first call.

    Args:
        values: the attributes as they are now: ``(owner, name, value)``.
    """

    def __init__(self, message: str, values: Sequence[tuple[Any, str, Any]]) -> None:
        super().__init__(message)
        self._values = values

    def settle(self) -> None:
        """Sets the attributes to the values after that pass, which a capture would otherwise restore."""
        for owner, name, value in self._values:
            setattr(owner, name, value)


def _attribute_facts(owner: Mapping[str, Any], is_custom: bool = True) -> Iterator[tuple[str, Any]]:
    """Attributes and snapshots of their values; only public ones unless ``is_custom`` (not torch's own)."""
    for name, value in owner.items():
        if name in _OF_MODULES or (name[:1] == "_" and not is_custom):
            continue
        snapshot = _value_snapshot(value)
        if snapshot is not _MISSING:
            yield name, snapshot


def _value_snapshot(value: Any) -> Any:
    """A comparable snapshot of an attribute's value; ``_MISSING`` for values that are ignored."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        # Long lists and dictionaries count by their lengths alone.
        items = [_value_snapshot(item) for item in value] if len(value) <= 64 else []
        return (type(value), len(value), [item for item in items if item is not _MISSING])
    if isinstance(value, dict):
        entries = {key: _value_snapshot(item) for key, item in value.items()} if len(value) <= 64 else {}
        return (dict, len(value), {key: item for key, item in entries.items() if item is not _MISSING})
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))  # its identity, not its values
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return _MISSING


def _iter_owners(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """A model's modules and configs, once each: name for messages, owner, and whether the class is custom."""
    ids: set[int] = set()
    for path, module in model.named_modules():
        for name, owner in ((path, module), (f"{path}.config".removeprefix("."), vars(module).get("config"))):
            if owner is not None and hasattr(owner, "__dict__") and id(owner) not in ids:
                ids.add(id(owner))
                yield name, owner, not type(owner).__module__.startswith("torch.")


class PythonState:
    """The attributes of a model's modules when it was captured.

    Registered tensors are left out, since the graph reads them when it runs.

    Args:
        reads: the relevant attributes, as owner's path and name; ``None`` for all.
    """

    def __init__(self, model: nn.Module, reads: Collection[tuple[str, str]] | None = None) -> None:
        self._counts_all = reads is None
        self._owners = []
        for path, owner, custom in _iter_owners(model):
            facts = _attribute_facts(vars(owner), custom)
            relevant = {
                name: value for name, value in facts if reads is None or (plain_name(path), name) in reads
            }
            if relevant or reads is None:
                self._owners.append((path, owner, custom, relevant))

    def holds(self) -> bool:
        """Whether no attribute has changed."""
        for _, owner, _, facts in self._owners:
            attributes = vars(owner)
            for name, value in facts.items():
                now = attributes.get(name, _MISSING)
                if now is not value and _value_snapshot(now) != value:
                    return False
        return True

    def changed(self) -> dict[str, tuple[Any, str, Any]]:
        """Relevant attributes that have changed or are new, as owner, name and value by path."""
        changes = {}
        for path, owner, custom, facts in self._owners:
            now = dict(_attribute_facts(vars(owner), custom))
            for name in {**facts, **now} if self._counts_all else facts:
                if facts.get(name, _MISSING) != now.get(name, _MISSING):
                    changes[f"{path}.{name}".removeprefix(".")] = (owner, name, vars(owner).get(name))
        return changes


@contextmanager
def reads_recorded(model: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Records the attributes of modules and configs that the code inside reads, as owner's path and name."""
    paths = {id(owner): path for path, owner, _ in _iter_owners(model)}
    reads: set[tuple[str, str]] = set()
    kinds: dict[type, type] = {}
    owners = [(owner, type(owner)) for _, owner, _ in _iter_owners(model)]

    def recording(kind: Any) -> type:  # a subclass that records reads
        def __getattribute__(self: Any, name: str) -> Any:
            if name[:2] != "__":
                reads.add((paths.get(id(self), ""), name))
            return kind.__getattribute__(self, name)

        body = {
            "__getattribute__": __getattribute__,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        }
        return type(kind.__name__, (kind,), body)

    for owner, kind in owners:
        try:
            owner.__class__ = kinds.setdefault(kind, recording(kind))
        except TypeError:  # whose layout is its own: all its attributes count
            reads |= {(paths[id(owner)], name) for name in vars(owner)}
    try:
        yield reads
    finally:
        for owner, kind in owners:
            owner.__class__ = kind


def carry_state(model: nn.Module, copy: nn.Module) -> None:
    """Copies the present attributes of the model's modules to the modules of a copy."""
    mine = dict(copy.named_modules(remove_duplicate=False))
    ids: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        other = mine.get(plain_name(path))
        module = unwrap_checkpoint(module)
        if other is None or id(other) in ids:
            continue
        ids.add(id(other))
        for owner, target in ((module, other), (vars(module).get("config"), vars(other).get("config"))):
            if owner is None or target is None or not hasattr(owner, "__dict__") or owner is target:
                continue
            for name, value in _attribute_facts(vars(owner)):
                if _value_snapshot(vars(target).get(name, _MISSING)) != value:
                    setattr(target, name, vars(owner)[name])


@contextmanager
def repeatable(model: nn.Module) -> Iterator[None]:
    """Refuses effects of a forward pass of ``model`` that would happen only once, during the capture.

    Raises:
        UnrepeatableError: naming the effect.
    """
    state, tensor_ids = PythonState(model), _registered_tensor_ids(model)
    generator_states = random.getstate(), _numpy_state()  # not torch's, so a graph would not repeat the draws
    with _Watch(), refusing_autograd_functions(_refuse_function):
        yield
    changes, now = state.changed(), _registered_tensor_ids(model)
    replacements = [name for name in tensor_ids if tensor_ids[name] != now.get(name)]
    if changes or replacements:
        text = (
            f"its forward pass changes {', '.join([*replacements, *changes][:3])}, which a graph would change once and never again; "
            "write to a registered buffer in place (copy_, add_) instead"
        )
        raise UnrepeatableError(text) if replacements else ChangedError(text, list(changes.values()))
    if generator_states != (random.getstate(), _numpy_state()):
        raise UnrepeatableError(
            "its forward pass draws random numbers from Python or NumPy, which a graph would draw only once; use torch's"
        )


def refuse_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuses the user's forward hooks on captured modules, since their side effects would be lost.

    Raises:
        UnrepeatableError: naming the module.
    """
    for path, module in modules:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            function = inspect.unwrap(hook)  # of what the compiler leaves alone
            home = getattr(getattr(function, "func", function), "__module__", None) or type(hook).__module__
            if not home.startswith(_OURS):
                raise UnrepeatableError(f"{path} has a forward hook, which a graph would not call")


def _registered_tensor_ids(model: nn.Module) -> dict[str, int]:
    return {
        f"{path}.{name}".removeprefix("."): id(tensor)
        for path, module in model.named_modules()
        for owner in (module._parameters, module._buffers)
        for name, tensor in owner.items()
    }


def _numpy_state() -> str:
    _, keys, *rest = np.random.get_state()
    return repr((hash(np.asarray(keys).tobytes()), rest))


def _refuse_function(kind: type) -> None:
    raise UnrepeatableError(
        f"it calls {kind.__qualname__}, an autograd.Function, whose backward pass is not in a graph of the forward pass; register "
        "it with register_op, or as a torch custom operator"
    )


class _Watch(TorchFunctionMode):
    """Refuses actions on tensors outside of operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            raise UnrepeatableError("it registers a hook on a tensor, which a graph would not call")
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise UnrepeatableError("it assigns the data of a tensor; write to it in place (copy_) instead")
        return func(*args, **(kwargs or {}))
