"""Sharded parameters for code outside of their unit: reads, as ``F.linear(x, layer.weight)``, and methods such as ``encode``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial
from torch.overrides import TorchFunctionMode

from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.capture.operators import METADATA
from atorch_ns.data import user_module
from atorch_ns.errors import StepError
from atorch_ns.job import Job
from atorch_ns.job.states import reshard
from atorch_ns.text import first_few
from atorch_ns.torch_compat import plain_name

_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
"""The attributes that compute; all others only describe the tensor."""


class GatherWhereRead(TorchFunctionMode):
    """Gathers a sharded parameter for a function that is called with it outside of the parameter's unit.

    A unit gathers its parameters for its own forward pass alone, so that other code would meet this rank's shard. The
    gradient is averaged over the ranks and divided among them, as a unit's is. The first pass of a model is watched;
    later ones are, too, if that one read a parameter so.

    Args:
        mesh: the ranks that parameters are sharded over.
        dtype: the dtype that units gather in; ``None`` for the parameters' own.
    """

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._mesh = mesh
        self._dtype = dtype
        self._names: dict[int, str] | None = None
        self._depth = 0
        self.read: list[str] = []

    def attach(self, root: nn.Module) -> None:
        """Watches the passes of ``root``, whose units are sharded."""
        root.register_forward_pre_hook(self._begin)
        root.register_forward_hook(self._end, always_call=True)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        describes = func in METADATA or (getattr(func, "__name__", "") == "__get__" and func not in _VIEWS)
        if not describes and any(self._is_apart(tensor) for tensor in tensors_of((args, dict(kwargs)))):
            args, kwargs = map_tensors(self._whole, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _begin(self, root: nn.Module, _: Any) -> None:
        if self._names is None:
            self._names = {id(p): plain_name(name) for name, p in root.named_parameters()}
        elif not self.read:
            return
        self._depth += 1
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._depth:
            self._depth -= 1
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _is_apart(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor) and id(tensor) in (self._names or {})

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_apart(tensor):
            return tensor
        assert isinstance(tensor, DTensor)
        assert self._names is not None
        name = self._names[id(tensor)]
        if tensor.device_mesh != self._mesh:
            raise StepError(
                f"{name} is read outside of the forward pass of its module, where it is not whole: it is divided over "
                f"{' and '.join(tensor.device_mesh.mesh_dim_names or ())}. Call the module, or train without these axes."
            )
        if name not in self.read:
            self.read.append(name)
        whole = tensor.full_tensor(grad_placements=[Partial()] * self._mesh.ndim)
        if whole.requires_grad:
            whole.register_hook(lambda gradient: gradient / self._mesh.size())
        return whole if self._dtype is None else whole.to(self._dtype)


def gather_where_read(job: Job, method: str, options: Mapping[str, Any]) -> None:
    """Lets the model's code read parameters of units that it does not call, and says in the report which it reads."""
    if job.plan.compiled:  # the compiler would trace the hooks
        return
    policy = options.get("mp_policy")
    watch = GatherWhereRead(options["mesh"], None if policy is None else policy.param_dtype)
    for root in job.roots:
        watch.attach(root)
    job.explain(
        method,
        lambda: (
            f"{first_few(watch.read, 3)}: gathered where the model reads them, outside of the units they belong to"
            if watch.read
            else ""
        ),
    )


_RUN: Final = "run_with_gathered_parameters"


def gather_for_methods(job: Job) -> None:
    """Has the methods of the user's model do what they did before a model of ``fully_shard`` was made of it.

    A method that is given tensors counts as a forward pass of the root, unless it is called inside of one. Others, such as
    ``get_input_embeddings()`` and ``save_pretrained(state_dict=...)``, which a rank may call alone, stay as they are.
    """
    if job.parts.stages:  # a pipeline has no model to call
        return
    root = job.module
    setattr(root, _RUN, lambda function, *args, **kwargs: function(*args, **kwargs))
    register_fsdp_forward_method(root, _RUN)
    running = _Running(root, job)
    for module in dict.fromkeys((root, user_module(root))):
        for name, method in _methods(module):
            module.__dict__[name] = running.around(method)


class _Running:
    """Whether a forward pass of a model runs."""

    def __init__(self, root: nn.Module, job: Job) -> None:
        self._root, self._job = root, job
        self._depth = 0
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave, always_call=True)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with the parameters of the root gathered."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not any(map(_has_tensors, (*args, *kwargs.values()))):
                return method(*args, **kwargs)
            self._depth += 1
            try:
                output = getattr(self._root, _RUN)(method, *args, **kwargs)
                if not torch.is_grad_enabled():
                    reshard(self._root)
                self._job.gradients.follow_call(self._job.module, output)
                return output
            finally:
                self._depth -= 1

        return call

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1


def _has_tensors(argument: Any) -> bool:
    values = argument if isinstance(argument, (list, tuple)) else (argument,)
    return any(isinstance(value, torch.Tensor) for value in values)


def _methods(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that a user's class defines, without those of every module."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    names = dict.fromkeys(
        name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)
    )
    for name in names:
        if not name.startswith("_") and not hasattr(nn.Module, name):
            yield name, getattr(module, name)
