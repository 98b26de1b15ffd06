"""Fake tensors, tensors under transforms, dispatch modes and registered containers."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from atorch_ns.errors import InputError


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """A mode in which tensors have shapes, dtypes and storages but no memory (``torch._subclasses``).

    Real tensors combined with fake ones are treated as fake too.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    _start_autograd()
    return FakeTensorMode(allow_non_fake_inputs=True)


@functools.cache
def _start_autograd() -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    # Autograd counts devices in the first backward pass of a process. Of fake tensors it finds eight and
    # starts a thread for each, after which a forked process cannot run a backward pass (torch 2.13).
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def exporting_fake_mode() -> AbstractContextManager[Any]:
    """A fake mode with dynamic sizes. ``torch.export`` accepts its tensors as parameters and inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _start_autograd()
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def sample_size(size: int | torch.SymInt, otherwise: int) -> int:
    """The value of a dynamic size in the sample; ``otherwise`` for a size that depends on data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else otherwise


def fake_tensor_type() -> type[torch.Tensor]:
    """The class of fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Suspends the active fake mode. Code inside runs on real tensors."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextmanager
def quiet_fake_kernels() -> Iterator[None]:
    """Keeps torch from logging operators that fake tensors lack; their errors are raised as before."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def gpu_described(index: int, name: str, total_memory: int, capability: tuple[int, int]) -> Iterator[None]:
    """Answers queries about the GPU by packages during their import, so that these do not start CUDA.

    torchao asks by ``torch.utils._triton.has_triton``, through ``torch._dynamo.device_interface``, whose
    cache of answers is cleared at the end.

    Args:
        index, name, total_memory, capability: as ``torch.cuda.get_device_properties`` has them.
    """
    from torch._dynamo import device_interface

    major, minor = capability
    properties = SimpleNamespace(name=name, total_memory=total_memory, major=major, minor=minor)
    answers = {
        "current_device": index,
        "get_device_name": name,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "is_current_stream_capturing": False,  # every step of an optimizer asks, up to torch 2.12
    }
    with ExitStack() as stack:
        for question, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, question, _Answer(answer)))
        stream = SimpleNamespace(is_capturing=_Answer(value=False))  # which optimizers ask from torch 2.13 on
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", _Answer(stream)))
        stack.callback(device_interface.caching_worker_device_properties.pop, "cuda", None)
        yield


@dataclass(frozen=True)
class _Answer:
    value: Any

    def __call__(self, device: Any = None) -> Any:
        return self.value


_DROPOUT_OF_HEADS = list(inspect.signature(functional.multi_head_attention_forward).parameters).index(
    "dropout_p"
)


_ARGUMENTS = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
)  # of fused attention, by position


class KernelsOfGpus(TorchFunctionMode):
    """Runs dropout as GPUs do, with a byte mask, and none in fused attention, whose kernels draw it again.
    Attention with values of another width than its queries is one operator; so is what is :func:`fused`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replaces these functions, and calls all others."""
        options = dict(kwargs or {})
        if func is functional.dropout and not options.get("inplace") and options.get("training", True):
            p = args[1] if len(args) > 1 else options.get("p", 0.5)
            tensor = args[0] if args else options["input"]
            if 0 < p < 1 and len(args) < 3:
                return torch.native_dropout(tensor, p, True)[0]
        if func is functional.scaled_dot_product_attention:
            options |= {"attn_mask": None, **options, **dict(zip(_ARGUMENTS, args, strict=False))}
            args, options["dropout_p"] = (), 0.0
            query, value = options["query"], options["value"]
            if query.dim() == 4 and query.shape[-1] != value.shape[-1]:  # which the CPU writes out
                return _run_kernel(**options)
        # Its inner calls do not reach this mode. Without weights it computes fused attention.
        if func is functional.multi_head_attention_forward and not options.get("need_weights", True):
            args = (*args[:_DROPOUT_OF_HEADS], 0.0, *args[_DROPOUT_OF_HEADS + 1 :])
        return func(*args, **options)


def _run_kernel(
    query: Any, key: Any, value: Any, *, attn_mask: Any, is_causal: bool = False, **_: Any
) -> Any:
    """Attention as one operator of fake tensors, with values of any width."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # kernels add masks to the scores
        attn_mask = torch.where(attn_mask, query.new_zeros(()), -torch.inf)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kernel = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    return kernel(query, key, value, attn_mask, 0.0, is_causal)[0]


_Function = Callable[..., Any]


def fused(
    function: _Function, like: str = "attention", *, is_causal: bool = False, window: int | None = None
) -> _Function:
    """Says that a function is one kernel, as which a profile for GPUs counts it. It is called as it is.

    Args:
        function: ``(queries, keys, values, ...) -> result`` of [B, H, T, E], [B, G, S, E], [B, G, S, F] and
            [B, H, T, F].
        like: the kind of kernel, ``"attention"``.
        is_causal: whether no token sees a later one, unless a call says it by its own keyword ``is_causal``.
        window: number of keys that a query sees; ``None`` for all.

    Raises:
        InputError: if ``like`` is another kind.
    """
    if like != "attention":
        raise InputError(
            f"fused(like={like!r}): only the cost of attention is known without its kernel. Use like='attention', "
            "or leave fused out: other functions are counted by the operators that they call."
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        modes = () if torch.compiler.is_compiling() else _get_current_function_mode_stack()
        if not any(isinstance(mode, KernelsOfGpus) for mode in modes):
            return function(*args, **kwargs)
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments  # in the function's order
        query, key, value, *others = _pytree.tree_leaves(list(arguments.values()))
        # What else is trained, such as sinks, has its gradient as a bias of no size.
        learning = (x for x in others if isinstance(x, torch.Tensor) and x.requires_grad and x.numel())
        biases = [x[(0,) * x.dim()] for x in learning]
        bias = functools.reduce(torch.add, biases) if biases else None
        keys = key[..., :window, :], value[..., :window, :]  # as many pairs as the window has
        return _run_kernel(query, *keys, attn_mask=bias, is_causal=kwargs.get("is_causal", is_causal))

    return call


def count_operators(action: Callable[[], object]) -> int:
    """Counts the operators, except views, that ``action`` runs forward and backward (by a dispatch mode)."""

    class Counter(TorchDispatchMode):
        count: int = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            aliases = [value.alias_info for value in func._schema.returns]
            is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
            self.count += not is_view
            return func(*args, **(kwargs or {}))

    with Counter() as counter:  # type: ignore[no-untyped-call]
        action()
    return int(counter.count)


def tensor_without_storage(cls: Any, like: torch.Tensor, shape: Sequence[int]) -> Any:
    """An instance of the tensor class ``cls`` with the dtype and device of ``like`` and no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)


def is_transformed() -> bool:
    """Returns whether code runs inside a ``torch.func`` transform, which leaves gradients to the caller."""
    from torch._C._functorch import peek_interpreter_stack

    return peek_interpreter_stack() is not None


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside those that ``torch.vmap`` and ``torch.func`` put around it."""
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def registered_children(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]] | None:
    """Children of a ``_pytree``-registered value and a function that rebuilds it from others, or ``None``."""
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    parts, context = node.flatten_fn(value)
    return parts, lambda others: node.unflatten_fn(list(others), context)


def is_view(tensor: torch.Tensor) -> bool:
    """True if a tensor is a view for autograd: in-place operators on it also rewrite its base's history."""
    return tensor._is_view()
