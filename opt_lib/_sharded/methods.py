"""Methods of a sharded model beside forward, such as ``encode``: its parameters are gathered for them too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from atorch_ns.data import user_module
from atorch_ns.job import Job
from atorch_ns.job.states import reshard

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
