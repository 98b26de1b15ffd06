"""Private names of torch about modules: wrappers, buffers, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs


class SetsInside:
    """Mixin of wrapper classes. Attributes set by a loop (``block.drop_path = 0.1``) go to ``inside``."""

    inside: str

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_modules", {}).get(self.inside)
        belongs = name in self.__dict__ or hasattr(type(self), name)  # as forward, which a loop may replace
        if inner is None or name.startswith("_") or name == self.inside or belongs:
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)


class CheckpointWrapper(SetsInside, torchs.CheckpointWrapper):
    """torch's wrapper, which calls a module through ``checkpoint_fn`` and keeps parameter names."""

    inside = "_checkpoint_wrapped_module"


def checkpoint_wrapper(module: nn.Module, checkpoint_fn: Callable[..., Any]) -> nn.Module:
    """Wraps ``module`` in a :class:`CheckpointWrapper`."""
    wrapper = torchs.CheckpointWrapper(module, checkpoint_fn=checkpoint_fn)
    wrapper.__class__ = CheckpointWrapper  # whose own attributes are there by now
    return wrapper


def unwrap_checkpoint(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper; any other module as it is."""
    children = module._modules  # of a TorchScript module, it is not a dictionary and has no get()
    inner = children["_checkpoint_wrapped_module"] if "_checkpoint_wrapped_module" in children else None  # noqa: SIM401
    return module if inner is None else inner


WRAPPER_PREFIXES = (
    "_checkpoint_wrapped_module.",
    "_fsdp_wrapped_module.",
    "_orig_mod.",
    "_pipeline_unit.",
    "_parallelized.",
)
"""Parts that wrappers, pipeline units and parallel modules insert into names of parameters inside them."""


def pipeline_unit(module: nn.Module) -> tuple[str, nn.Module]:
    """Path (``"._pipeline_unit"``) and inner module of a pipeline unit; empty path and itself for others."""
    inner = module._modules["_pipeline_unit"] if "_pipeline_unit" in module._modules else None  # noqa: SIM401
    return ("", module) if inner is None else ("._pipeline_unit", inner)


def is_stand_in(module: nn.Module) -> bool:
    """Returns whether a module is a placeholder for a module on other pipeline ranks."""
    return bool(getattr(type(module), "is_stand_in", False))


def stood_for(module: nn.Module) -> nn.Module:
    """The module without memory that a stand-in replaces; any other module is returned itself."""
    original: nn.Module = module.__dict__["_original"] if is_stand_in(module) else module
    return original


def plain_name(name: str) -> str:
    """Removes inner wrappers from a dotted path."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "").removesuffix("." + prefix.removesuffix("."))
    return name


@contextmanager
def refusing_autograd_functions(refuse: Callable[[type], None]) -> Iterator[None]:
    """Calls ``refuse`` with the class of each ``torch.autograd.Function`` applied, except torch's own."""
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            refuse(cls)
        return original.__func__(cls, *args, **kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers in the module's state (``nn.Module`` calls them persistent), each by its first name."""
    entries: dict[int, tuple[str, torch.Tensor]] = {}
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                entries.setdefault(id(buffer), (plain_name(f"{path}.{name}" if path else name), buffer))
    return dict(entries.values())


class PackageHook(partial[None]):
    """A hook registered by this package and not by a user."""


_TAKEN = PackageHook(lambda _: None)

HookTable = dict[int, Any] | None
"""Hooks on a parameter's gradient by handle number; ``None`` if there are none."""


def hook_tables(parameter: torch.Tensor) -> tuple[HookTable, HookTable]:
    """The hook tables of ``register_hook`` and ``register_post_accumulate_grad_hook``."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter's gradient has any hook, including the package's own."""
    return any(hook is not _TAKEN for table in hook_tables(parameter) if table for hook in table.values())


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer has step hooks. It has none without ``Optimizer.__init__``."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks that an optimizer calls after its steps (``_optimizer_step_post_hooks``)."""
    return list(getattr(optimizer, "_optimizer_step_post_hooks", {}).values())


def has_user_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter's gradient has a user's hook."""
    tables = (table for table in hook_tables(parameter) if table)
    return any(not isinstance(hook, PackageHook) for table in tables for hook in table.values())


class TakenHook:
    """A user's hook that autograd no longer calls. Its handle can still remove it."""

    def __init__(self, table: dict[int, Any], number: int) -> None:
        self._table, self._number, self._hook = table, number, table[number]
        table[number] = _TAKEN

    @property
    def is_registered(self) -> bool:
        """False after the user has removed the hook."""
        return self._number in self._table

    def __call__(self, value: torch.Tensor) -> Any:
        """Calls the user's function."""
        return self._hook(value)


def take_hooks(table: HookTable) -> list[TakenHook]:
    """Removes the user's functions from a table and returns them."""
    users = [number for number, hook in (table or {}).items() if not isinstance(hook, PackageHook)]
    return [TakenHook(table, number) for number in users if table is not None]


_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip


def hooks_inside(module: nn.Module) -> list[Any]:
    """Hook tables of the modules inside a module. They persist when hooks are added or removed."""
    inside = (inner for inner in module.modules() if inner is not module)
    return [getattr(inner, kind) for inner in inside for kind in _HOOKS if hasattr(inner, kind)]


def inner_hooks(module: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """Hooks on the modules inside a module: the path, the kind, and the number of each.

    torch does not compare them where it reuses the compiled code of an equal module.
    """
    return tuple(
        (path, kind, len(hooks))
        for path, inner in module.named_modules()
        if path
        for kind in _HOOKS
        if (hooks := getattr(inner, kind, None))
    )
