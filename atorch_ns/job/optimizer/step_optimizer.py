"""Optimizer wrapper: fp32 master weights, loss scaling, skipped steps."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from atorch_ns.capture.user_code import names_in_method
from atorch_ns.errors import StepError
from atorch_ns.job.gradients import gradient_norm, gradient_versions
from atorch_ns.job.loss import LossScaler
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.torch_compat import after_backward


class MasterWeights:
    """Pairs of a model parameter and its fp32 copy.

    Gradients belong to the parameters, where loops read and change them. Masters have them during updates.

    Args:
        parameters: the model's parameters. Those that are not floating or already fp32 are their own masters.
        on_host: whether all floating parameters (plain tensors in this case) have a master in host memory.
        is_pinned: whether that memory is pinned, which makes copies asynchronous.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], *, on_host: bool = False, is_pinned: bool = False
    ) -> None:
        self._on_host = on_host
        self._is_pinned = is_pinned
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # host buffers by parameter
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._parameters: dict[torch.Tensor, torch.Tensor] = {}  # by master
        self._marks: dict[torch.Tensor, tuple[int, int]] = {}  # of parameters, at the last update
        self._versions: dict[torch.Tensor, int] = {}  # of masters and host buffers, at the last update
        self._num_updates = 0
        self._is_written = False  # the loop writes through .data
        for parameter in parameters:
            if parameter.requires_grad:
                self._add_master(parameter)

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that the optimizer updates for ``parameter``."""
        return self._masters.get(parameter, parameter)

    def parameter_of(self, target: torch.Tensor) -> torch.Tensor:
        """The model's parameter for which the optimizer updates ``target``."""
        return self._parameters.get(target, target)

    def is_rounded(self, parameter: torch.Tensor) -> bool:
        """Returns whether the parameter is narrower than its master and was written since the last copy."""
        master = self._masters.get(parameter)
        is_narrow = master is not None and master.dtype != parameter.dtype
        mark = self._marks.get(parameter)  # None before the first copy: first steps may be skipped
        return is_narrow and mark is not None and mark != _version_mark(parameter)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """``(parameter, master)`` of every parameter that has one."""
        yield from self._masters.items()

    def groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """Parameter groups with every parameter replaced by its master."""
        return [{**group, "params": [self.master_of(p) for p in group["params"]]} for group in groups]

    def adopt(self, groups: Iterable[dict[str, Any]]) -> None:
        """Replaces thawed parameters by masters in the groups of their optimizer."""
        for group in groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None and parameter not in self._parameters:
                    self._add_master(parameter)  # thawed since
                    group["params"][index] = self.master_of(parameter)

    def _add_master(self, parameter: torch.Tensor) -> None:
        if self._on_host and parameter.is_floating_point():
            master = self._host_tensor(parameter).copy_(parameter.detach())
        elif not self._on_host and parameter.dtype in (torch.float16, torch.bfloat16):
            master = parameter.detach().to(torch.float32)
        else:
            return  # fp32 or integers need no master
        self._masters[parameter] = torch.nn.Parameter(master)
        self._parameters[self._masters[parameter]] = parameter

    @torch.no_grad()
    def widen_gradients(self) -> None:
        """Makes gradients fp32 on the device, where they are scaled and clipped and keep small values."""
        for parameter in () if self._on_host else self._masters:
            if parameter.grad is not None:
                _set_gradient(parameter, parameter.grad.to(torch.float32))

    @torch.no_grad()
    def lend_gradients(self) -> None:
        """Gives the masters the parameters' gradients for an update: the same tensors, or copies on the host."""
        self.widen_gradients()
        for parameter, master in self._masters.items():
            gradient = parameter.grad
            if gradient is not None and self._on_host:
                if parameter not in self._gradients:  # allocated once and reused
                    self._gradients[parameter] = self._host_tensor(parameter)
                gradient = self._gradients[parameter].copy_(gradient, non_blocking=self._is_pinned)
                self._versions[gradient] = gradient._version
            master.grad = gradient
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()  # the host reads them next

    @torch.no_grad()
    def return_gradients(self) -> None:
        """Takes lent gradients back, with what the update has changed, replaced or cleared."""
        for parameter, master in self._masters.items():
            gradient, master.grad = master.grad, None
            if gradient is None or self._versions.get(gradient) != gradient._version:
                _set_gradient(parameter, gradient, parameter.dtype if self._on_host else None)

    @torch.no_grad()
    def narrow_gradients(self) -> None:
        """Gives gradients the parameters' dtype again, as backward passes and copies of the model expect."""
        for parameter in self._masters:
            _set_gradient(parameter, parameter.grad, parameter.dtype)

    @torch.no_grad()
    def take_writes(self) -> None:
        """Takes over values that a loop has written to the parameters since the last update.

        A write through ``parameter.data`` leaves no mark. All parameters are thus compared before the first
        updates, and before each update once a loop has made such a write. Unchanged elements stay exact.
        """
        for parameter, master in self._masters.items():
            is_marked = self._marks.get(parameter) != _version_mark(parameter)
            is_new = self._versions.get(master) != master._version
            if is_new or is_marked or self._is_written or self._num_updates < _NUM_LOOKS:
                master_part = local_part(master)  # each rank looks at its own part
                here = local_part(parameter).to(device=master_part.device)
                is_same = here == master_part.to(here.dtype)
                # The master was written after the last update, while the model used other values.
                if not is_same.all() and self._versions.get(master, master._version) != master._version:
                    raise StepError(_WRITTEN_MASTERS)
                self._is_written |= not is_marked and not bool(is_same.all())  # written through .data
                master_part.copy_(torch.where(is_same, master_part, here.to(master_part.dtype)))

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Rounds the masters into the parameters."""
        self._num_updates += 1
        for parameter, master in self._masters.items():
            parameter.copy_(master, non_blocking=self._is_pinned)
            self._marks[parameter], self._versions[master] = _version_mark(parameter), master._version

    def _host_tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=torch.float32, device="cpu", pin_memory=self._is_pinned)


_WRITTEN_MASTERS: Final = (
    "the optimizer's fp32 copies of weights were written outside of its step: the model has not computed with what was written. "
    "Write to result.model.parameters(), which result.optim.param_groups hold too; the copies take it over."
)
_NUM_LOOKS: Final = 3
"""Updates before which all parameters are compared with masters. A loop's repeated writes show by then."""


def _set_gradient(parameter: Any, gradient: Any, dtype: torch.dtype | None = None) -> None:
    parameter.grad, parameter.grad_dtype = None, dtype  # None: any, as fp32 of 16 bits
    parameter.grad = None if gradient is None else gradient.to(parameter.device, dtype)


def _version_mark(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, local_part(tensor).data_ptr()  # changes with a write or a move


_Map = Callable[[Any], Any]


class StateView(MutableMapping[Any, Any]):
    """Optimizer states by the user's parameters. ``find`` gives the updated tensor, and ``show`` its parameter."""

    def __init__(self, states: MutableMapping[Any, Any], find: _Map, show: _Map = lambda key: key) -> None:
        self._states, self._find, self._show = states, find, show

    def __getitem__(self, key: Any) -> Any:
        return self._states[self._find(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._states[self._find(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._states[self._find(key)]

    def __contains__(self, key: object) -> bool:
        return self._find(key) in self._states

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: D102  # of a dictionary
        return self._states.get(self._find(key), default)

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: D102  # of a dictionary
        return self._states.pop(self._find(key), *default)

    def __iter__(self) -> Iterator[Any]:
        return map(self._show, self._states)

    def __len__(self) -> int:
        return len(self._states)


class ListView(list[Any]):
    """A list that passes its elements to ``write`` after each change. Copies are plain lists."""

    def __init__(self, elements: Iterable[Any], write: Callable[[list[Any]], None]) -> None:
        super().__init__(elements)
        self._write = write

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def _writes_through(name: str) -> Callable[..., Any]:
    def change(view: ListView, *args: Any, **kwargs: Any) -> Any:
        result = getattr(list, name)(view, *args, **kwargs)
        view._write(view)
        return result

    return change


for _name in (
    *("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"),
    *("__delitem__", "__iadd__", "__imul__", "__setitem__"),
):
    setattr(ListView, _name, _writes_through(_name))


class GroupView(MutableMapping[str, Any]):
    """An optimizer's group with the user's parameters, as in :class:`StateView`. Copies are dictionaries."""

    def __init__(self, group: dict[str, Any], find: _Map, show: _Map) -> None:
        self.group, self._find, self._show = group, find, show

    def __getitem__(self, key: str) -> Any:
        value = self.group[key]
        return ListView(map(self._show, value), partial(self.__setitem__, key)) if key == "params" else value

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            self.group[key][:] = map(self._find, value)
        else:
            self.group[key] = value

    def __delitem__(self, key: str) -> None:
        del self.group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __len__(self) -> int:
        return len(self.group)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:  # noqa: D102  # of a dictionary
        return dict(self)


class StepOptimizer(torch.optim.Optimizer):
    """An optimizer around another one: unscales gradients, skips bad steps, keeps fp32 master weights.

    Only :meth:`step`, :meth:`zero_grad` and, with masters, hooks around a step are its own. Everything else
    belongs to the inner optimizer, which schedulers, other hooks and ``state_dict`` see. Groups and states
    show the model's parameters in place of masters.

    Args:
        inner: the user's optimizer, already created on the master weights if there are any.
        scaler: dynamic loss scaling, or ``None``.
        masters: fp32 copies, or ``None``.
        skip_if_nonfinite: whether a step with infinite or NaN gradients is skipped without a scaler.
        group: the ranks that must skip a step together; ``None`` for one rank.
        finish: completes gradients that are incomplete after the backward pass; ``None`` if all are complete.
        norm: the norm of some parameters' gradients, over all ranks that hold part of them.

    Attributes:
        num_skipped: steps skipped so far.
        skipped: whether the last step was skipped.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        scaler: LossScaler | None = None,
        masters: MasterWeights | None = None,
        skip_if_nonfinite: bool = False,
        group: dist.ProcessGroup | None = None,
        finish: Callable[[], None] | None = None,
        norm: Callable[[list[torch.Tensor]], torch.Tensor] = gradient_norm,
    ) -> None:
        # Optimizer.__init__ is not called: it would build a second, empty set of groups and state.
        self.inner = inner
        self.scaler = scaler
        self.masters = masters
        self.num_skipped = 0
        self.skipped = False
        self._skip_if_nonfinite = skip_if_nonfinite
        self._group = group
        self._finish = finish
        self._norm = norm
        self._is_prepared = False  # gradients are fp32 and unscaled
        self._overflow = False  # on any rank
        self._scaled_versions: dict[torch.Tensor, tuple[int, int, int]] = {}
        self._is_mixed = self._is_late = False  # some gradients have no scale; a pass came after preparing
        self._has_warned = False
        self._hooks = {moment: OrderedDict[int, Callable[..., Any]]() for moment in ("pre", "post")}
        if scaler is not None:
            scaler.at_backward = self._begin_backward
            self._look_at_steps(register_optimizer_step_pre_hook, self._refuse_other)
        if masters is not None:
            self._look_at_steps(register_optimizer_step_post_hook, self._warn_of_other)

    def prepare_gradients(self) -> None:
        """Prepares ``grad`` of the model's parameters for clipping and stepping: fp32 and unscaled.

        Runs once a step, at clipping or at :meth:`step`, whichever comes first. Collective. A loop that
        changes gradients itself calls it first, after the last backward pass.

        Raises:
            StepError: if the loss is not from the result's loss function, or scaled gradients were changed.
        """
        if self._is_late:
            raise StepError(
                "a backward pass ran after the gradients were clipped or prepared in the same step. Under fp16 run all backward "
                "passes of a step first; bf16 has no scale."
            )
        if self._is_prepared and (self.masters is None or self.scaler is not None):
            return  # else a further pass may have come in the same step
        if self._scaled_versions and (self._is_mixed or self._is_changed()):
            raise StepError(
                "gradients were changed while they had the loss scale of fp16: clipped, written to, kept from an earlier step "
                "(zero_grad), or added to by the backward pass of a loss that is not from result.loss_func. Add losses to that, call "
                "result.clip_grad_norm_ or result.prepare_gradients() before you change gradients otherwise, or use bf16, which has "
                "no scale."
            )
        self._is_prepared, self._scaled_versions = True, {}
        if self._finish is not None:
            self._finish()
        if self.masters is not None:
            self.masters.adopt(self.inner.param_groups)  # of thawed parameters
            self.masters.widen_gradients()
        if self.scaler is None:
            return
        if self.scaler.num_backwards == 0 and self._has_gradients():
            raise StepError(
                "fp16 needs a scaled loss, but no backward pass since the last step came from the loss "
                "function that auto_accelerate returned. Use result.loss_func(batch, output), or "
                "result.train_step(batch)."
            )
        self._overflow = self.scaler.unscale(self)

    @contextmanager
    def in_scale(self) -> Iterator[None]:
        """A context for code that changes gradients and uses their scale."""
        is_mixed = self._is_mixed or self._is_changed()
        yield
        self._note_gradients()
        self._is_mixed = is_mixed  # changes of the block count as scaled

    def _look_at_steps(self, register: Callable[[Any], RemovableHandle], look: Callable[..., None]) -> None:
        method = WeakMethod(look)  # this object may die before torch's global hooks
        finalize(self, register(lambda *args: (call := method()) and call(*args)).remove)

    def _warn_of_other(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self.masters is not None
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        # An optimizer that calls this one's step has already had the masters written.
        if not self._has_warned and any(map(self.masters.is_rounded, updated)):
            self._has_warned = True
            warnings.warn(
                f"an optimizer not created by auto_accelerate ({type(optimizer).__name__}) updates 16-bit weights: its updates are rounded, and "
                "the fp32 copies take over what is rounded. Let result.optim update them (optim_func, with groups).",
                stacklevel=4,  # above the hook and torch's wrapper of step
            )

    def _refuse_other(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p in self._scaled_versions for p in updated):
            raise StepError(
                f"an optimizer not created by auto_accelerate ({type(optimizer).__name__}) would update parameters whose gradients have the "
                "loss scale of fp16. Let result.optim update them (optim_func, with groups), or use bf16, which has no scale."
            )

    def _begin_backward(self) -> None:
        self._is_late = self._is_late or self._is_prepared
        self._is_mixed = self._is_mixed or self._is_changed(zeros=False)
        # After the completion of gradients, which waits for other ranks twice.
        after_backward(lambda: after_backward(lambda: after_backward(self._note_gradients)))

    def _note_gradients(self) -> None:
        self._scaled_versions = gradient_versions(self._with_scale())

    def _is_changed(self, *, zeros: bool = True) -> bool:
        # Zeros are right under any scale.
        return any(
            version != self._scaled_versions.get(parameter)
            and ((zeros and parameter in self._scaled_versions) or bool(local_part(parameter.grad).any()))
            for parameter, version in gradient_versions(self._with_scale()).items()
        )

    def _with_scale(self) -> list[torch.Tensor]:
        return [] if self.scaler is None or self._is_prepared else self._all_parameters()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the weights, or skips the update on all ranks if a gradient is infinite or NaN."""
        if closure is not None and self.scaler is not None:
            raise StepError(
                "a closure evaluates the model inside the step, and the loss scale must not change there. Use "
                "bf16 with optimizers that need a closure."
            )
        if closure is None:
            self.prepare_gradients()
        self._call_hooks("pre")
        if closure is not None and self.masters is not None and not self._skip_if_nonfinite:
            result = self.inner.step(partial(self._evaluate_closure, closure))  # may call it several times
            self._end_update()
            return result
        loss = None if closure is None else torch.enable_grad()(closure)()  # the step may be skipped
        self.prepare_gradients()
        self.skipped = self._overflow or (self._skip_if_nonfinite and self._has_nonfinite())
        if not self.skipped:
            self._lend_to_masters()
            self.inner.step()
        if self.scaler is not None:
            self.scaler.adapt(self._overflow)
        if self.skipped:
            self.num_skipped += 1
            self._forget_gradients()
        else:
            self._end_update()
        return loss

    def _lend_to_masters(self) -> None:
        if self.masters is not None:
            self.masters.take_writes()
            self.masters.lend_gradients()

    def _end_update(self) -> None:
        if self.masters is not None:
            self.masters.copy_to_parameters()
            self.masters.return_gradients()
        self._forget_gradients()
        self._call_hooks("post")

    def _call_hooks(self, moment: str) -> None:
        for hook in tuple(self._hooks[moment].values()):
            hook(self, (), {})

    def _evaluate_closure(self, closure: Callable[[], float]) -> float:
        assert self.masters is not None
        self.masters.copy_to_parameters()  # the optimizer may have moved masters
        self._forget_gradients()
        with torch.enable_grad():
            loss = closure()
        self.prepare_gradients()
        self._lend_to_masters()
        return loss

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook called when gradients are prepared. With masters, it sees the model's parameters."""
        return self._register_hook("pre", hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook called after an update. With masters, the update has reached the model."""
        return self._register_hook("post", hook)

    def _register_hook(self, moment: str, hook: Callable[..., Any]) -> RemovableHandle:
        if self.masters is None:
            handle: RemovableHandle = getattr(self.inner, f"register_step_{moment}_hook")(hook)
        else:
            handle = RemovableHandle(self._hooks[moment])
            self._hooks[moment][handle.id] = hook
        return handle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the weights."""
        self.inner.zero_grad(set_to_none)
        if self.masters is not None:
            for parameter, _ in self.masters.pairs():
                is_none = set_to_none or parameter.grad is None
                parameter.grad = None if is_none else torch.zeros_like(parameter)  # in 16 bits again
        if self.scaler is not None:
            self.scaler.num_backwards = 0
            if self._is_prepared:  # the step is skipped
                self.scaler.forget_unscaled()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._is_prepared = self._overflow = self._is_mixed = self._is_late = False
        self._scaled_versions = {}
        if self.masters is not None:
            self.masters.narrow_gradients()

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """The inner optimizer's groups, with the model's parameters. What changes here also changes there."""
        if self.masters is None:
            return self.inner.param_groups
        find, show = self.masters.master_of, self.masters.parameter_of
        return ListView((GroupView(group, find, show) for group in self.inner.param_groups), self._set_groups)

    def _set_groups(self, groups: Iterable[Any]) -> None:
        assert self.masters is not None
        entries = [(group, *self.masters.groups([group])) for group in groups]
        self.inner.param_groups[:] = [g.group if isinstance(g, GroupView) else new for g, new in entries]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, also keyed by the model's parameters if it updates masters."""
        masters, state = self.masters, self.inner.state
        return StateView(state, masters.master_of, masters.parameter_of) if masters else state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the inner optimizer's state."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer.

        Raises:
            StepError: with master weights, which exist only for the first groups.
        """
        if self.masters is not None:
            raise StepError("parameters cannot be added after fp32 master weights were made")
        self.inner.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, as in a copy
            raise AttributeError(name)
        attribute = getattr(self.inner, name)
        is_method = callable(attribute) and not hasattr(torch.optim.Optimizer, name)
        return partial(self._call_method, attribute) if is_method else attribute

    def _call_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Methods such as SAM's first_step read gradients, so they must be prepared.
        names = names_in_method(method, type(self.inner), torch.optim.Optimizer)
        is_reading = not names.isdisjoint(("grad", "step", "zero_grad"))
        if is_reading:
            self.prepare_gradients()
        if self._overflow:
            raise StepError(
                "gradients are infinite or NaN under the loss scale of fp16, and only step() skips an update then. Use a smaller "
                "init_scale, or bf16, for an optimizer with several steps."
            )
        if self.masters is None:
            return method(*args, **kwargs)
        self.masters.take_writes()
        if is_reading:
            self.masters.lend_gradients()
        before = [master._version for _, master in self.masters.pairs()]
        result = method(*args, **kwargs)
        if [master._version for _, master in self.masters.pairs()] != before:  # it has written weights
            self.masters.copy_to_parameters()
        if is_reading:
            self.masters.return_gradients()
        return result

    def __repr__(self) -> str:
        return repr(self.inner)

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._all_parameters())

    def _all_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _has_nonfinite(self) -> bool:
        parameters = self._all_parameters()
        # The norm is finite only if all elements are. A rank may hold a part, so all ranks decide.
        flag = (~torch.isfinite(self._norm(parameters))).float()
        if self._group is not None:
            flag = flag.to(parameters[0].device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The user's optimizer inside a :class:`StepOptimizer`, or any other optimizer unchanged."""
    return optimizer.inner if isinstance(optimizer, StepOptimizer) else optimizer
