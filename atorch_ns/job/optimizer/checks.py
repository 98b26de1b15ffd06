"""Checks of optimizers: what those of torch and other packages cannot update, found before the first step."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.errors import BackendError, InputError
from atorch_ns.job.job import Job, ParameterGroups
from atorch_ns.text import count_noun, error_text
from atorch_ns.torch_compat import TorchDispatchMode

_SHAPES: Final = ((4, 6), (6, 4))  # of the two trial parameters
_STEPS: Final = 6  # per trial
_LARGE: Final = 1e4
"""Factor of the last gradients, which exceed any norm that gradients are clipped to."""
_TOLERANCES: Final = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Allowed difference of updates relative to the largest. Estimated steps start at 1e-6, finer than fp32."""
_KNOWN: Final = ("torch.optim.", "torchao.", "bitsandbytes.")
"""Modules whose optimizers, except LBFGS, update each parameter independently."""
_Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_Updates = list[list[torch.Tensor]]
"""Change of each parameter in each step."""


def require_separable(job: Job, groups: ParameterGroups) -> str:
    """Tests the user's optimizer on two small parameters together and on each alone.

    Called only if a rank's optimizer has some of the parameters (ZeRO, pipelines). An optimizer that uses all
    parameters, such as a norm over all gradients, would silently train wrongly. If parameters are DTensors,
    optimizers that read numbers out of them are refused. The random states are restored.

    Args:
        job: the job, with ``optim_func`` and the division of parameters.
        groups: the groups of the real parameters, whose options are tested.

    Returns:
        A warning about an optimizer that could not be tested, or an empty text.

    Raises:
        BackendError: if joint and separate updates differ.
    """
    if job.inputs.optim_func is None or job.inputs.optimizer_is_trusted or _is_known(job.inputs.optim_func):
        return ""
    has_shards = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
    if not has_shards and not _is_divided(job):
        return ""
    if _is_divided(job):
        _refuse_choice(job, groups)
    for options in _distinct_options(groups):  # a flag may turn a coupling on
        make = partial(_new_optim, job, options)
        with random_states_kept(job.device), warnings.catch_warnings(action="ignore"):
            try:
                optimizer = make(_make_parameters(torch.float32, torch.device("cpu")))
            except Exception as error:  # the real call reports its own errors better
                return _untried_text(job, error)
            skip = isinstance(optimizer, (torch.optim.LBFGS, *NOT_OF_DTENSORS)) or _is_known(type(optimizer))
            if has_shards and not skip:
                _require_tensors(job, make)
            if not _is_divided(job):
                continue
            if isinstance(optimizer, torch.optim.LBFGS):
                raise _coupling_error(job, "LBFGS searches along one direction of all parameters together")
            if _is_known(type(optimizer)):
                continue
            couples, why = _try_coupling(make, job.device)
        if couples:
            raise _coupling_error(job, "its updates of two parameters together and of each alone differ")
        if why is not None:
            return _untried_text(job, why)
    return ""


def _refuse_choice(job: Job, groups: ParameterGroups) -> None:
    function, params = job.inputs.optim_func, [p for group in groups for p in group["params"]]
    if job.inputs.optim_param_func is not None or not isinstance(function, FunctionType):
        return
    fakes = [nn.Parameter(torch.empty(p.shape, device="meta"), requires_grad=p.requires_grad) for p in params]
    # Called with meta parameters, which shows a function that filters. Given groups, it would take all.
    try:
        new_groups = function(fakes, **_copy_arguments(job)).param_groups
    except Exception:  # the real call reports its errors better
        return
    if len(new_groups) > 1 or len(new_groups[0]["params"]) < len(params):
        raise InputError(
            f"optim_func makes {count_noun(len(new_groups), 'group')} of {sum(len(group['params']) for group in new_groups)} of the "
            f"{count_noun(len(params), 'parameter')}. Under this strategy it gets groups, [{{'params': [...]}}], of which ranks hold "
            "parts: split groups by optim_param_func=lambda model: groups, or train under ddp, fsdp or zero2."
        )


def _copy_arguments(job: Job) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in dict(job.inputs.optim_args or {}).items()
    }


def _is_divided(job: Job) -> bool:
    if job.mesh is None:
        return False
    by_layout = job.plan.sharding.layout != "rows" and job.num_data_ranks > 1
    return by_layout or job.stage_group is not None


def _require_tensors(job: Job, make: _Make) -> None:
    try:
        # Other values change any number that is read. item() of a DTensor reads only this rank's part.
        numbers, other = (_numbers_read(make, factor) for factor in (1.0, 3.0))
    except Exception:  # failures on plain tensors are not judged here; DTensors use it unchanged
        return
    if numbers != other:
        raise BackendError(
            f"{_optimizer_name(job)} reads numbers out of sums over gradients or weights (.item(), float()). This strategy turns "
            "parameters into DTensors, where such a number covers only the rank's own part, so ranks would diverge "
            "silently. Use ddp, zero1 if it updates each parameter by itself, or an optimizer that keeps such "
            "values in tensors."
        )


def _numbers_read(make: _Make, factor: float) -> list[Any]:
    """Numbers read by steps, with weights multiplied by ``factor`` and gradients by its square."""
    parameters = _make_parameters(torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)
    optimizer = make(parameters)
    reads = _Reads()
    with reads:
        for step in _make_gradients():
            _set_gradients(parameters, [factor**2 * gradient for gradient in step])
            optimizer.step()
    return reads.numbers


class _Reads(TorchDispatchMode):
    """Records numbers that are read from tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:  # item(), float(), bool()
            self.numbers.append(result)
        return result


def _is_known(kind: Any) -> bool:
    has_known_module = isinstance(kind, type) and kind.__module__.startswith(_KNOWN)
    return has_known_module and kind is not torch.optim.LBFGS


def _distinct_options(groups: ParameterGroups) -> list[dict[str, Any]]:
    variants: dict[Any, dict[str, Any]] = {}
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        choices = {key: value if isinstance(value, (bool, str)) else None for key, value in options.items()}
        variants.setdefault(tuple(sorted(choices.items(), key=str)), options)  # numbers make no variant
    return list(variants.values())


def _new_optim(job: Job, options: Mapping[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    assert job.inputs.optim_func is not None
    optimizer: Any = job.inputs.optim_func([{**options, "params": parameters}], **_copy_arguments(job))
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float) and group["lr"] == 0:  # as at the start of a warm-up
            group["lr"] = 1e-3
    if callable(getattr(optimizer, "train", None)):  # averaging ones refuse steps in evaluation mode
        optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _try_coupling(make: _Make, device: torch.device) -> tuple[bool, Exception | None]:
    why: Exception | None = None
    places = dict.fromkeys((torch.device("cpu"), device))
    for target, dtype, with_closure in itertools.product(places, _TOLERANCES, (False, True)):
        try:  # the first trial that works decides
            return _is_coupled(
                partial(_run_updates, make, dtype, target, with_closure), _TOLERANCES[dtype]
            ), None
        except Exception as error:
            why = why or error
    return False, why


def _is_coupled(run: Callable[..., _Updates], tolerance: float) -> bool:
    together = run((0, 1))
    if not any(bool(update.any()) for updates in together for update in updates):
        raise ValueError("it changed neither of two small parameters")
    alone = [[*first, *second] for first, second in zip(run((0,)), run((1,)), strict=True)]
    if not _has_difference(together, alone, tolerance):
        return False
    # Updates that change with the seed show nothing about coupling.
    if _has_difference(together, run((0, 1), seed=1), tolerance):
        raise ValueError("its updates are random")
    return True


def _has_difference(first: _Updates, second: _Updates, tolerance: float) -> bool:
    pairs = zip(itertools.chain(*first), itertools.chain(*second), strict=True)
    for tensor, other in pairs:
        scale = float(torch.maximum(tensor.abs().max(), other.abs().max()))
        rounding = 16 * torch.finfo(tensor.dtype).eps  # weights are of order one
        if not torch.allclose(tensor, other, rtol=0, atol=tolerance * scale + rounding, equal_nan=True):
            return True
    return False


def _make_parameters(dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator, device="cpu") for shape in _SHAPES]
    return [nn.Parameter(start.to(device, dtype)) for start in starts]


def _make_gradients() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    main = [torch.randn(shape, generator=generator, device="cpu") for shape in _SHAPES]
    return [
        [
            (_LARGE if step == _STEPS - 1 else 1.0)
            * (each + 0.3 * torch.randn(each.shape, generator=generator, device="cpu"))
            for each in main  # a single direction, so that estimated step sizes grow
        ]
        for step in range(_STEPS)
    ]


def _run_updates(
    make: _Make,
    dtype: torch.dtype,
    device: torch.device,
    with_closure: bool,
    indices: Sequence[int],
    *,
    seed: int = 0,
) -> _Updates:
    torch.manual_seed(seed)
    random.seed(seed)
    parameters = [_make_parameters(dtype, device)[index] for index in indices]
    optimizer = make(parameters)
    updates = []
    for step in _make_gradients():
        before = [parameter.detach().clone() for parameter in parameters]
        give = partial(_set_gradients, parameters, [step[index] for index in indices])
        give()
        arguments: list[Any] = [give] if with_closure else []
        optimizer.step(*arguments)
        updates.append([p.detach() - old for p, old in zip(parameters, before, strict=True)])
    return updates


def _set_gradients(parameters: list[nn.Parameter], gradients: list[torch.Tensor]) -> torch.Tensor:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
    return torch.ones((), device=parameters[0].device)  # as a closure's loss


def _optimizer_name(job: Job) -> str:
    return getattr(job.inputs.optim_func, "__name__", "the optimizer")


def _coupling_error(job: Job, why: str) -> BackendError:
    return BackendError(
        f"{_optimizer_name(job)} updates each parameter by what it sees of the others: {why}. Under this strategy the optimizer "
        "of a rank has a part of the parameters, so it would train otherwise than one process, without an error. Use "
        "ddp, fsdp or zero2 (without not_use_fsdp and DeepSpeed), whose optimizers see all parameters, or "
        "an optimizer that updates each by itself; clip gradients by max_grad_norm in place of within the optimizer."
    )


def _untried_text(job: Job, error: Exception) -> str:
    return (
        f"{_optimizer_name(job)} could not be tried with small parameters ({error_text(error)}). Under this strategy "
        "the optimizer of a rank has a part of the parameters, which is right only if it updates each by itself. If it "
        "looks at several, by a norm of all gradients or an estimated step size, use ddp, fsdp or zero2."
    )


NOT_OF_DTENSORS: Final = (torch.optim.Adafactor, torch.optim.Rprop)
"""torch optimizers with in-place operators that DTensors refuse in the first step (torch 2.11 to 2.13)."""


def refuse_what_fails(optimizer: torch.optim.Optimizer) -> None:
    """Checks the parameters of a new optimizer for cases that its package is known not to update.

    Raises:
        InputError: naming the package, the reason and a working alternative.
    """
    package = type(optimizer).__module__.partition(".")[0]
    name = f"{package}.optim.{type(optimizer).__name__}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = {parameter.dtype for parameter in parameters if isinstance(parameter, DTensor)}
    if dtypes and package == "bitsandbytes":  # its kernels take plain tensors
        raise InputError(
            f"{name} cannot update DTensors, and this strategy turns parameters into DTensors. Use "
            "torchao.optim.AdamW8bit, or shard with zero1 or ('zero2', {'not_use_fsdp': True}), whose optimizers see "
            "plain tensors."
        )
    # torchao's quantized states seem to have the dtype of DTensors, so mixed dtypes fail in the first step.
    if dtypes - {torch.float32} and package == "torchao":
        raise InputError(
            f"{name} cannot update DTensors in 16 bits. Use ('amp_native', 'bf16') instead of half, or "
            "('half', 'fp16'), whose fp32 masters it updates."
        )
    is_mixed = dtypes and not all(isinstance(parameter, DTensor) for parameter in parameters)
    if is_mixed and isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS makes one vector of all parameters, but this rank holds only parts of some of them. Use ddp."
        )
    base = next((kind for kind in NOT_OF_DTENSORS if isinstance(optimizer, kind)), None)
    if dtypes and base is not None:
        name = f"torch.optim.{base.__name__}"
        if type(optimizer) is not base:
            name = f"{type(optimizer).__name__}, of {name},"
        raise InputError(
            f"{name} cannot update DTensors, and this strategy turns parameters into DTensors: torch has no rule for one of "
            "its in-place operators. Shard with zero1 or ('zero2', {'not_use_fsdp': True}), use ddp, or use another "
            "optimizer, such as AdamW."
        )


def keeps_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether it is a bitsandbytes optimizer with 8-bit states, some with one value per block.

    Parameters that are too small for 8 bits still have states with one value per element.
    """
    ours = type(optimizer).__module__.partition(".")[0] == "bitsandbytes"
    return ours and getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8
