"""Sharded parameters read outside of their unit, as in ``F.linear(x, layer.weight)``, and by methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.capture.operators import METADATA
from atorch_ns.data import user_module
from atorch_ns.errors import StepError
from atorch_ns.job import Job
from atorch_ns.job.loss import ForwardScope
from atorch_ns.job.states import reshard
from atorch_ns.text import first_few
from atorch_ns.torch_compat import (
    after_backward,
    begin_root,
    in_backward,
    parameters_of,
    plain_name,
    reads_divided_memory,
    show_gathered,
    show_shards,
)
from opt_lib._sharded.idle import call_in_backward

_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
"""The attributes that compute; all others only describe the tensor."""
_OF_GRADIENTS = ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")


class ReadsOutsideOfUnits(TorchFunctionMode):
    """Finds sharded parameters that functions read outside of the forward pass of their unit.

    Functions gather them (``torch_compat.divided_tensors``). Later passes are watched if the first reads so.

    Args:
        dtype: the dtype that units gather in; ``None`` for the parameters' own.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._names: dict[int, str] = {}
        self._depth = 0
        self.read_names: dict[str, None] = {}
        root.register_forward_pre_hook(self._begin_pass)
        root.register_forward_hook(self._end_pass, always_call=True)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Shapes, dtypes and hooks need no values, so nothing is gathered for them.
        describes = func in METADATA or (name == "__get__" and func not in _VIEWS) or name in _OF_GRADIENTS
        if not describes and any(id(tensor) in self._names for tensor in tensors_of((args, dict(kwargs)))):
            args, kwargs = map_tensors(self._note_read, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _begin_pass(self, root: nn.Module, _: Any) -> None:
        if not self._names:
            self._names = {id(p): plain_name(name) for name, p in root.named_parameters()}
        elif not self.read_names:  # the first pass read none
            return
        self._depth += 1
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end_pass(self, *_: Any) -> None:
        if self._depth:
            self._depth -= 1
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _note_read(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor) or id(tensor) not in self._names:
            return tensor
        self.read_names[self._names[id(tensor)]] = None
        return tensor if self._dtype is None else tensor.to(self._dtype)


def gather_where_read(job: Job, method: str, options: Mapping[str, Any]) -> None:
    """Lets the model's code read parameters of units that it does not call, and reports which it reads."""
    if job.plan.compiled:  # the compiler would trace the hooks
        return
    policy = options.get("mp_policy")
    reads = [ReadsOutsideOfUnits(root, None if policy is None else policy.param_dtype) for root in job.roots]

    def text() -> str:
        names = [name for read in reads for name in read.read_names]
        what = "gathered where the model reads them, outside of the units they belong to"
        return f"{first_few(names, 3)}: {what}" if names else ""

    job.explain(method, text)


class ShardsBetweenPasses:
    """Shows a model's shards between its passes, even if parameters stay gathered for the backward pass.

    torch leaves the root's gathered, and under ``zero2`` and ``replicate`` all. Values computed from them would
    lose their memory in the next backward pass, and no later pass would read what an optimizer or a loop wrote
    to them. A call of a unit by itself, or of another method of the model, is a pass too.
    """

    def __init__(self, root: nn.Module, job: Job) -> None:
        self._root, self._job = root, job
        # The user's code may write to them before a backward pass; then passes gather anew.
        self._is_written = not job.parts.stages
        self.units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._is_shown = False  # though something is gathered
        self._is_in_backward = False
        self._depth = 0
        self._method = ""  # of the model, the outermost that runs
        self._call_to_meet = ""  # until something is gathered for it
        self._scope = ExitStack()
        for path, module in root.named_modules():
            units: list[Any] = [each for each in module.modules() if isinstance(each, FSDPModule)]
            if module in units:
                begin = partial(self._begin_pass, units, plain_name(path))
                module.register_forward_pre_hook(torch.compiler.disable(begin), prepend=True)
                end = torch.compiler.disable(partial(self._end_pass, units))
                module.register_forward_hook(end, always_call=True)
        # Before torch's, which lets go of what is gathered.
        root.register_state_dict_pre_hook(lambda *_: self._show_gathered(self.units))

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the model, with the parameters of the root gathered if it is given tensors."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # inside of a pass all is gathered
                return method(*args, **kwargs)
            outer, self._method = self._method, self._method or f"{method.__name__}()"
            # One rank may call it alone without a batch, as one that saves a dict of weights.
            run = self._run_gathered if any(map(_has_tensors, (*args, *kwargs.values()))) else _run
            try:
                with self.autocast_outside():
                    output = run(method, args, kwargs)
            finally:
                self._method = outer
            if tensors_of((args, kwargs)):
                self._job.gradients.follow_call(self._job.module, output)
            return output

        return call

    def _run_gathered(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        output = None
        try:
            self._begin_pass(self.units, self._method)
            output, names = getattr(self._root, _RUN)(self._find_writes, method, args, kwargs)
        finally:
            self._end_pass(self.units, self._root, None, output)
        if names:
            reshard(self._root)  # once the pass has ended: the next must not compute with them
            raise StepError(
                f"{method.__name__}() writes to {first_few(names, 4)}, which are gathered copies while it runs: the writes would "
                "be lost. Write to the parameters outside of the methods that compute with a batch, or use ddp or zero1."
            )
        return output

    def _find_writes(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[str]]:
        whole = [
            (name, p, p._version) for name, p in self._root.named_parameters() if not isinstance(p, DTensor)
        ]
        output = method(*args, **kwargs)
        return output, [plain_name(name) for name, p, version in whole if p._version != version]

    def autocast_outside(self) -> AbstractContextManager[object]:
        """As around the forward pass, in whose dtype weights are gathered; nothing inside of one."""
        autocast = None if self._depth else self._job.precision.autocast
        return torch.autocast(autocast.device_type, autocast.dtype) if autocast else nullcontext()

    def _begin_pass(self, units: Sequence[FSDPModule], call: str, *_: Any) -> None:
        if self._is_in_backward and not in_backward():
            raise StepError(
                "an error has ended the last backward pass, and under this strategy the gradients and gathered weights that it left "
                "cannot be distinguished from those of the next. Restart from a checkpoint, or use ddp or zero1."
            )
        self._depth += 1
        if self._depth == 1:
            self._call_to_meet = "" if in_backward() else call and (self._method or call)
            if in_backward():  # a unit computes again
                self._resume_pass()
            else:
                self._scope.enter_context(_outside_of_inference_mode())
                self._show_gathered(units)  # which refuses parameters that have been replaced
                begin_root(self._root)
        if self._call_to_meet and any(True for _ in parameters_of(units[:1])):
            self._meet_others()

    def _meet_others(self) -> None:
        call, self._call_to_meet = self._call_to_meet, ""
        same_place = self._job.step.same_place
        if same_place is not None and self._job.plan.sharding.parameters_over:  # all ranks gather
            same_place.meet_sometimes(call if torch.is_grad_enabled() else f"{call} without gradients")

    def _end_pass(self, units: Sequence[FSDPModule], module: nn.Module, _: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)  # 0 where a hook before has raised
        if self._depth:
            return
        with self._scope:
            if in_backward():
                return
            if torch.is_grad_enabled():
                self._is_shown = show_shards(units)
                call_in_backward(output, self._begin_backward)
            else:
                reshard(module)  # no backward pass will follow

    def _show_gathered(self, units: Sequence[FSDPModule]) -> None:
        show_gathered(self.units if self._is_shown else units)
        # The user's code may have written to the shards, so the pass gathers anew.
        if self._is_shown and self._is_written:
            reshard(self._root)
        self._is_shown = False

    def _begin_backward(self) -> None:
        self._resume_pass()
        self._is_in_backward = True
        after_backward(partial(setattr, self, "_is_in_backward", False))

    def _resume_pass(self) -> None:
        begin_root(self._root)
        if self._is_shown:
            self._is_shown = False
            show_gathered(self.units)


@contextmanager
def _outside_of_inference_mode() -> Iterator[None]:
    # Memory that a unit first gathers in inference mode could not be trained with.
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


_RUN: Final = "run_with_gathered_parameters"


def gather_for_methods(job: Job, passes: Sequence[ShardsBetweenPasses]) -> None:
    """Lets the methods of the user's model work as before ``fully_shard``.

    For a method that is given tensors, also in a list, the parameters of the root are gathered, unless it is
    called inside of a forward pass. For others, such as one of a dict or ``get_input_embeddings()``, units and
    reads of single parameters gather what they use. A rank may call one alone if it uses none.
    """
    if job.parts.stages:  # a pipeline has no model to call
        return
    root = job.module
    # torch gathers around methods that it knows by name: this one runs any function.
    setattr(root, _RUN, lambda function, *args, **kwargs: function(*args, **kwargs))
    register_fsdp_forward_method(root, _RUN)
    inside = {module for unit in passes[0].units if unit is not root for module in unit.modules()}
    for module in () if job.plan.compiled else set(root.modules()) - inside - {root}:
        if module._parameters:  # which may be called by itself, as a head
            ForwardScope(passes[0].autocast_outside).attach(module)
    for module in dict.fromkeys((root, user_module(root))):
        for name, method in _public_methods(module):
            module.__dict__[name] = passes[0].around(method)


def _run(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return method(*args, **kwargs)
    except RuntimeError as error:
        if not reads_divided_memory(error):
            raise
        raise StepError(
            f"{method.__name__}() reads the memory of divided weights, of which each rank has a part. Call "
            'checkpoint.export_safetensors(result, "folder") on every rank, which transformers\' from_pretrained reads.'
        ) from error


def _has_tensors(argument: Any) -> bool:
    values = argument if isinstance(argument, (list, tuple)) else (argument,)
    return any(isinstance(value, torch.Tensor) for value in values)


def _public_methods(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    # Methods that every module has stay as they are.
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    names = dict.fromkeys(
        name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)
    )
    for name in names:
        if not name.startswith("_") and not hasattr(nn.Module, name):
            yield name, getattr(module, name)
