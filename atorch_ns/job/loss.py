"""Precision of a job: autocast, loss scaling and casts around the model and the user's loss function."""

from __future__ import annotations

import builtins
import dis
import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType, NoneType, NotImplementedType
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from atorch_ns.capture.nests import batch_sizes, floats_to, map_tensors, tensors_of
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.capture.user_code import nested_codes
from atorch_ns.cluster import Cluster
from atorch_ns.data import Reduction, split_batch
from atorch_ns.errors import AtorchError, InputError
from atorch_ns.torch_compat import found_inf_tensors, local_grad_scaler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Autocast:
    """Autocast around forward passes and the loss."""

    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True)
class LossScaling:
    """Scaling of the loss, by a constant or by a number that halves after overflows and doubles otherwise.

    Attributes:
        init_scale: the first scale.
        growth_interval: steps without an overflow after which the scale doubles.
        hysteresis: overflows before the scale halves, reset when it doubles. Each later overflow halves it.
        min_scale: lower limit of the scale after overflows.
        static_scale: constant scale that replaces the other fields; ``None`` for an adaptive scale.
    """

    init_scale: float = 2.0**16
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0
    static_scale: float | None = None


_LARGEST_SCALE = 2.0**127
"""Its double is infinite in fp32."""


class LossScale:
    """The loss scale over steps, equal on ranks that receive the same overflows."""

    def __init__(self, scaling: LossScaling) -> None:
        self.value = scaling.init_scale if scaling.static_scale is None else scaling.static_scale
        self._scaling = scaling
        self._good_steps = 0
        self._num_left = scaling.hysteresis

    def advance(self, overflow: bool) -> float:
        """Returns the scale after a step with or without an overflow."""
        scaling = self._scaling
        if scaling.static_scale is not None:
            return self.value
        if overflow:
            self._good_steps = 0
            # The first hysteresis - 1 overflows change nothing; each later one halves the scale.
            self._num_left = max(self._num_left - 1, 0)
            if self._num_left == 0:
                self.value = max(self.value / 2, scaling.min_scale)
            return self.value
        self._good_steps += 1
        if self._good_steps >= scaling.growth_interval:
            self._good_steps, self._num_left = 0, scaling.hysteresis
            # A user's scale above the limit is kept.
            self.value = min(self.value * 2, max(self.value, _LARGEST_SCALE))
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """The scale and the counters, with torch's names where its ``GradScaler`` has them."""
        return {"scale": self.value, "_growth_tracker": self._good_steps, "hysteresis_left": self._num_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, also of a ``GradScaler``. Adaptation settings and a static scale stay."""
        if self._scaling.static_scale is None:
            self.value = max(float(state["scale"]), self._scaling.min_scale)
            self._good_steps = int(state["_growth_tracker"])
            # torch's GradScaler has no hysteresis.
            self._num_left = min(int(state.get("hysteresis_left", self._num_left)), self._scaling.hysteresis)


@dataclass(kw_only=True)
class JobPrecision:
    """Precision of a job's forward passes, and protection of its gradients.

    Attributes:
        autocast: autocast around the step; ``None`` for none.
        loss_scaling: settings of the loss scale; ``None`` for none.
        scaler: the loss scaler, created with the job; ``None`` without ``loss_scaling``.
        skip_if_nonfinite: whether steps with infinite or NaN gradients are skipped without a scaler.
        input_dtype: dtype that floating inputs are cast to; ``None`` to keep theirs.
        restore: makes all layers of a copy of a module compute in the dtype of their weights again. ``None``
            if they already do. See :meth:`atorch_ns.job.Job.in_full_precision`.
    """

    autocast: Autocast | None = None
    loss_scaling: LossScaling | None = None
    scaler: LossScaler | None = None
    skip_if_nonfinite: bool = False
    input_dtype: torch.dtype | None = None
    restore: Callable[[nn.Module], None] | None = None


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating tensors among the model's inputs to ``dtype``, before every forward pass."""

    model.register_forward_pre_hook(_Cast(dtype), with_kwargs=True, prepend=True)


class ForwardScope:
    """A context around every forward pass of a module, set by hooks. Copied and pickled with the module.

    Args:
        make: creates the context for each pass. May be replaced later.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def attach(self, module: nn.Module) -> None:
        """Surrounds the module's forward passes, including its other hooks before and after them."""
        module.register_forward_pre_hook(self._enter_context, prepend=True)
        module.register_forward_hook(self._exit_context, always_call=True)

    def _enter_context(self, *_: Any) -> None:
        context = self.make()
        context.__enter__()
        self._entered.append(context)

    def _exit_context(self, *_: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entered": []}  # contexts belong to running calls


class _Cast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return floats_to(args, self._dtype), floats_to(kwargs, self._dtype)


class LossScaler:
    """A ``GradScaler`` whose scale applies in the backward pass, so that the loss itself stays readable.

    The loss returned by :meth:`scaled` has the user's value. Its backward pass multiplies the gradient by the
    scale, as do backward passes of derived values: ``(loss / 4 + penalty).backward()`` scales both terms.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        scaling: the first scale and its adaptation.
        group: the ranks that must skip a step together; ``None`` for one rank.

    Attributes:
        num_backwards: backward passes of scaled losses since the last step.
        at_backward: called when such a pass starts; ``None`` for nothing.
    """

    def __init__(
        self, device_type: str, scaling: LossScaling, *, group: dist.ProcessGroup | None = None
    ) -> None:
        self.scale = LossScale(scaling)
        self.scaler = local_grad_scaler(device_type, init_scale=self.scale.value)
        self.num_backwards = 0
        self.at_backward: Callable[[], None] | None = None
        self._group = group

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` with the scale applied in its backward pass, and in that of values computed from it."""
        if not loss.requires_grad:
            return loss
        view: torch.Tensor = _ScaleInBackward.apply(loss, self._scale_grad)  # type: ignore[no-untyped-call]
        result = view.as_subclass(_ScaledLoss)
        result.unscaled, result.scaler = loss, self
        return result

    def expect_scaled_gradients(self, device: torch.device) -> None:
        """Counts a backward pass whose loss is computed and equally scaled on another rank."""
        self._make_scale(device)
        self.num_backwards += 1

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divides the gradients of ``optimizer`` by the scale. Collective, also for a rank without gradients.

        Returns:
            Whether any gradient on any rank is infinite or NaN.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._make_scale(device)
        flags: list[torch.Tensor] = []
        if any(parameter.grad is not None for parameter in parameters):
            self.scaler.unscale_(optimizer)
            flags = found_inf_tensors(self.scaler, optimizer)
        if self._group is None:
            return any(float(flag) > 0 for flag in flags)
        overflow = torch.zeros((), device=device)  # without gradients the rank still joins the reduction
        for flag in flags:
            overflow = torch.maximum(overflow, flag.reshape(()).to(device))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._group)
        return bool(overflow)

    def adapt(self, overflow: bool) -> None:
        """Ends a step with the result of :meth:`unscale`, also on ranks without gradients."""
        self.scaler.update(self.scale.advance(overflow))  # this also resets torch's unscaled state
        self.num_backwards = 0

    def forget_unscaled(self) -> None:
        """Allows gradients to be unscaled again."""
        self.scaler.update(self.scale.value)

    def state_dict(self) -> dict[str, Any]:
        """The scale and the counters that decide its changes."""
        return self.scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state."""
        self.scale.load_state_dict(state)
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": self.scale.value})

    def _make_scale(self, device: torch.device) -> None:
        self.scaler.scale(torch.zeros((), device=device))  # torch creates its scale with the first loss

    def _scale_grad(self, gradient: torch.Tensor) -> torch.Tensor:
        self.num_backwards += 1
        if self.at_backward is not None:
            self.at_backward()
        return self.scaler.scale(gradient)


class _ScaledLoss(torch.Tensor):
    """A loss, or a value that a loop computes from it. The scale applies last and covers penalties too."""

    unscaled: torch.Tensor
    scaler: LossScaler

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # backward(), hooks and as_subclass act on the tensor itself, whose graph applies the scale.
        if func in _OF_ITSELF:
            return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]
        scaler = next(each.scaler for each in tensors_of((args, kwargs)) if isinstance(each, _ScaledLoss))
        # Other functions run on unscaled losses and scale the result, so the scale applies once.
        args, kwargs = map_tensors(lambda value: getattr(value, "unscaled", value), (args, kwargs or {}))
        return map_tensors(scaler.scaled, func(*args, **kwargs))


_OF_ITSELF: Final = (
    *(Tensor.backward, Tensor.register_hook, Tensor.retain_grad, Tensor.as_subclass, torch.autograd.backward),
    cast(Any, Tensor.grad_fn).__get__,
)


class _ScaleInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.scale(gradients[0]), None


LossFunction = Callable[[Any, Any], Any]
"""``(batch, output) -> loss``, or a list or tuple that begins with the loss."""


def wrap_loss(
    loss_func: LossFunction, *, autocast: Autocast | None, scaler: LossScaler | None, upcast: bool
) -> LossFunction:
    """The loss function for the user, which is the same object if nothing surrounds it.

    Args:
        loss_func: the user's function.
        autocast: the autocast for its calls; ``None`` for none.
        scaler: the scaler whose scale applies in its backward pass; ``None`` for none.
        upcast: whether it receives the model's floating outputs in fp32.
    """
    if autocast is None and scaler is None and not upcast:
        return loss_func

    @functools.wraps(loss_func)
    def compute_loss(batch: Any, output: Any) -> Any:
        if upcast:
            output = floats_to(output, torch.float32)
        context = torch.autocast(autocast.device_type, autocast.dtype) if autocast else nullcontext()
        with context:
            value = loss_func(batch, output)
        if scaler is None or scaler.at_backward is None:  # without an optimizer that takes the scale out
            return value
        return _with_first(value, scaler.scaled(first_loss(value)))

    return compute_loss


class LossCheck:
    """Tests on a batch's outputs whether a loss is a mean or a sum over samples, as steps without weights assume.

    The loss of a batch must be the mean or sum of the losses of its equal parts. Losses computed by the model,
    those that draw random numbers, and functions that may remember calls (annealing) are not tested.

    Args:
        device: the device of the batch.
        gathers: whether a loss may gather divided weights, which all ranks must do equally often.

    Attributes:
        law: what each call must give, ``""`` for anything. ``None`` in a custom loop, whose ranks average gradients:
            a mean in the first, tenth, hundredth call with gradients and so on.
        finding: the finding as a sentence. Empty if the law holds, or nothing was tested.
    """

    def __init__(self, device: torch.device, law: Reduction | Literal[""] | None, *, gathers: bool) -> None:
        self._device, self._gathers = device, gathers
        self.law = law
        self._num_calls = 0
        self.finding = ""

    def around(self, loss_func: LossFunction) -> LossFunction:
        """The same function, with its calls tested while the test is on."""

        if _user_classes(loss_func) or not _is_without_state(loss_func):
            return loss_func

        @functools.wraps(loss_func)
        def test_loss(batch: Any, output: Any) -> Any:
            value, law = loss_func(batch, output), self.law
            if not torch.is_grad_enabled():  # an evaluation
                law = ""
            if law is None:
                self._num_calls += 1
                law = "mean" if is_power_of_ten(self._num_calls) else ""
            if law and (self._gathers or not self.finding) and tensors_of(batch):
                with torch.set_grad_enabled(self._gathers), random_states_kept(self._device):
                    self._test_law(law, loss_func, (batch, output), first_loss(value))
            return value

        return test_loss

    def _test_law(self, law: Reduction, loss_func: LossFunction, data: Any, whole: torch.Tensor) -> None:
        if any(type(tensor) is not torch.Tensor for tensor in tensors_of(data[1])):
            return  # divided, on all ranks: parts of outputs would be whole tensors
        if self._gathers:
            data = _without_graph(data)
        parts, value = _parts_to_test(*data), float(whole.detach())
        if not parts and not self._gathers:
            return
        # Where a call may gather, ranks make equally many, whatever their batches.
        padding = [(parts or [data])[0]] * (_MOST_PARTS - len(parts) if self._gathers else 0)
        calls = [data, *padding, *parts]
        losses: list[float] = []
        with register_module_forward_pre_hook(_refuse_pass):  # also removed if the user interrupts
            for call in calls:
                try:
                    losses.append(float(first_loss(loss_func(*call)).detach()))
                except Exception:
                    log.debug("whether the loss is a %s over samples cannot be tested", law, exc_info=True)
        if len(losses) < len(calls) or not parts or self.finding:
            return
        if losses[0] != value and math.isfinite(value):  # it draws random numbers
            return
        losses, divisor = losses[-len(parts) :], len(parts) if law == "mean" else 1
        total, scale = sum(losses) / divisor, sum(map(abs, losses)) / divisor
        # Rounding may change half of the digits.
        if abs(total - value) <= torch.finfo(whole.dtype).eps ** 0.5 * max(1.0, scale, abs(value)):
            return
        self.finding = (
            f"the loss is not a {law} over samples: that of a batch is {value:.6g}, and the {law} of those of its {len(parts)} parts "
            f"{total:.6g}. {WAYS_OUT[law]}"
        )
        warnings.warn(self.finding, stacklevel=2)


def _without_graph(data: Any) -> Any:
    # Each float needs a gradient: numbers without one are taken to be equal on all ranks beside divided weights.
    return map_tensors(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, data)


def _parts_to_test(batch: Any, output: Any) -> list[Any]:
    """Equal parts of a batch and its outputs. None of a single row, or where losses of parts prove nothing."""
    sizes = batch_sizes((batch, output))
    floats = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    # Non-finite outputs prove nothing.
    if len(sizes) != 1 or not floats or not all(bool(tensor.isfinite().all()) for tensor in floats):
        return []
    (size,) = sizes
    num = max(n for n in range(1, _MOST_PARTS + 1) if size % n == 0)
    try:
        return split_batch((batch, output), num) if num > 1 else []
    except AtorchError:  # a list of another length, or an object without known parts
        return []


WAYS_OUT: Final[Mapping[Reduction, str]] = {
    "mean": "Ranks and micro-batches count alike, whatever they hold. For a mean over tokens pass weight_func=lambda batch: the number "
    "of tokens that count, for a sum loss_reduction='sum', to auto_accelerate, and call train_step; a loss over pairs of "
    "samples needs all of them on one rank",
    "sum": "The losses of ranks and micro-batches are added up, so a term that does not depend on samples, such as a penalty on "
    "weights, counts once for each. Multiply it by the batch's share of the samples of a step; for a mean leave out "
    "loss_reduction or pass weight_func instead; a loss over pairs of samples needs all of them on one rank",
}
"""What to do about a loss that is not the mean or sum over samples that a step takes it for."""


class RowCheck:
    """Warns once on which ranks samples weigh more than on others. The mean of each rank counts equally.

    All ranks compare their numbers only in the first step. Later a rank sees only changes of its own number.
    """

    def __init__(self, cluster: Cluster, num_data_ranks: int) -> None:
        self._cluster = cluster
        self._is_needed = num_data_ranks > 1
        self._rows: list[int | None] = []

    def look(self, rows: int | None) -> None:
        """Takes the number of samples of this rank's batch. Collective in the first call."""
        if not self._is_needed or self._rows == [rows]:
            return
        is_first = not self._rows
        counts = self._cluster.gathered(rows) if is_first else [*self._rows, rows]
        self._rows = [rows]
        sizes = sorted({number for number in counts if number is not None})
        if len(sizes) > 1:
            self._is_needed = False
            subject = "the batches of the ranks have"
            if not is_first:
                subject = "from one step to the next, this rank's batch has"
            warnings.warn(
                f"{subject} {sizes[0]} to {sizes[-1]} samples. Each rank's mean has equal weight, so the samples of a rank "
                "with fewer samples count more than in one process. Pass auto_accelerate a weight_func that returns the number of "
                "samples of a micro-batch.",
                stacklevel=2,
            )


def is_power_of_ten(number: int) -> bool:
    """Returns whether ``number`` is a power of ten, for checks that become ever rarer."""
    return str(number).strip("0") == "1"


def _is_without_state(loss_func: Any) -> bool:
    # Whether a call can change nothing that outlives it; anything unknown counts as changeable.
    values, functions = [loss_func], set[FunctionType]()
    kinds, names = set[type](), set[str]()
    for value in values:  # values grows while it is walked
        if isinstance(value, FunctionType) and value not in functions:
            functions.add(value)
            reads = _reads_of(value)
            if reads is None:
                return False
            values += reads[0]
            names |= reads[1]
        elif isinstance(value, nn.Module):  # only its methods: a test refuses its passes
            kinds.update(kind for module in value.modules() for kind in _user_classes(module))
        elif isinstance(value, tuple):
            values += value
        elif not isinstance(value, _CONSTANTS) and not (isinstance(value, type) and _is_foreign(value)):
            return False
        methods = [vars(kind)[name] for kind in kinds for name in names & vars(kind).keys()]
        values += [item for item in methods if isinstance(item, FunctionType) and item not in functions]
    return True


def _reads_of(function: FunctionType) -> tuple[list[Any], set[str]] | None:
    """Variables that a function reads, and names of attributes; ``None`` if it writes outside of itself."""
    if function.__module__.startswith("torch"):
        return [], set()
    reads: list[Any] = [cell.cell_contents for cell in function.__closure__ or ()]
    reads += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names: set[str] = set()
    for code in nested_codes(function.__code__):
        names.update(code.co_names)
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR"):
                return None
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                reads.append(function.__globals__.get(step.argval, getattr(builtins, step.argval, None)))
    return reads, names


def _user_classes(value: Any) -> list[type]:
    return [kind for kind in type(value).__mro__ if not _is_foreign(kind)]


def _is_foreign(kind: type) -> bool:
    return kind.__module__.startswith(("torch", "builtins"))


def _refuse_pass(module: nn.Module, _: Any) -> None:
    if _user_classes(module) or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise RuntimeError(f"a pass of {type(module).__name__} may change more than its output")


_CONSTANTS: Final = (
    *(NoneType, EllipsisType, NotImplementedType, int, float, str, bytes, torch.dtype, torch.device),
    *(torch.Tensor, ModuleType, BuiltinFunctionType, FunctionType),
)
_MOST_PARTS: Final = 16
"""Maximum number of parts for testing a batch. Smaller parts differ more in what the loss counts."""


def first_loss(value: Any) -> torch.Tensor:
    """The loss in the return value of a loss function.

    Raises:
        InputError: if there is no scalar tensor where the loss should be.
    """
    loss = value[0] if isinstance(value, (list, tuple)) and value else value
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"loss_func returned {type(value).__name__}, but the loss must be a tensor, or the first item of "
            "a list or tuple."
        )
    if isinstance(loss, DTensor):  # of divided weights alone: a rank may hold a summand of it
        loss = loss.full_tensor()
    if loss.numel() != 1:
        raise InputError(
            f"loss_func returned a tensor of shape {tuple(loss.shape)}; the loss must be one number. "
            "Reduce it, for example by .mean()."
        )
    return loss


def _with_first(value: Any, loss: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return loss
    if isinstance(value, list):
        return [loss, *value[1:]]
    if hasattr(value, "_replace"):
        return type(value)(loss, *value[1:])
    return (loss, *value[1:])
