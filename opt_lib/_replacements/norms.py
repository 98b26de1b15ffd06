"""Normalisations: hand-written ones become fused kernels, of torch, Liger or apex.

Models differ in details that no name tells: whether the weight counts from 0 or from 1, and the dtype of the
result where input and weight differ. So a module is judged by what it computes: it is called on a small
input, and has the form that agrees with it in values, gradients and dtypes.

Legend: D features.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile
from opt_lib._replacements.base import (
    ANYWHERE,
    Replacement,
    ReplacementOutcome,
    Requirements,
    classes_in,
    replace_modules,
)
from opt_lib._replacements.kernels import TRACED, layer_norm, rms_norm
from opt_lib._replacements.making import Derived, Forward, derive

ResultDtype = Literal["promoted", "input", "weight"]
_PROBED_DTYPES = (torch.float32, torch.bfloat16)
_ROW_SCALES = (1e-3, 1.0, 30.0)
"""Rows of these sizes: in the smallest, the epsilon decides."""
_LEADING = ((12,), (3, 12), (3, 2, 5))
"""Dimensions before the last: a module may depend on their number, or on the number of tokens."""
_PLAIN_NAMES = frozenset({"elementwise_affine"})
"""Attributes that only a constructor reads: whether there is a weight."""
_MARKS = ("__", "_is_hf_", "_stands_for_")
"""Prefixes of attributes that transformers and this package leave on modules of any class."""
_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True, kw_only=True)
class RmsNormForm:
    """One way to write ``x / rms(x) * weight``.

    Attributes:
        offset: the number that is added to the weight.
        result: the dtype of the result, where input and weight differ.
    """

    offset: float
    result: ResultDtype

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, kernel: str = "torch"
    ) -> torch.Tensor:
        """Normalises the last dimension of ``x`` [..., D] by a fused kernel; ``weight`` is [D]."""
        together = torch.promote_types(x.dtype, weight.dtype)
        result = {"promoted": together, "input": x.dtype, "weight": weight.dtype}[self.result]
        return rms_norm(kernel, x.to(together), weight.to(together), eps, self.offset).to(result)


def form_of(module: nn.Module, num_features: int, eps: float) -> RmsNormForm | str:
    """The form that computes what ``module`` does, or why there is none.

    Args:
        module: a module whose only parameter is ``weight``, [D]; it may be on the meta device.
        num_features: D.
        eps: the number that it adds to the mean square.
    """
    # Forms differ in the dtype of the result where those of input and weight differ.
    pairs = [(x, weight) for x in _PROBED_DTYPES for weight in _PROBED_DTYPES]
    probes = [(lead, *pair) for lead in _LEADING for pair in pairs]
    try:
        trial = copy.deepcopy(module)  # a forward pass may count its calls or keep its input
        before = _module_state(trial)
        by_mode = [
            [
                _run_probe(functools.partial(_call_with_weight, trial.train(mode)), num_features, *each)
                for each in probes
            ]
            for mode in (not module.training, module.training)
        ]
    except Exception as error:
        return f"it could not be tried on a small input ({type(error).__name__})"
    after = _module_state(trial)
    changes = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changes:
        return f"its forward pass changes {', '.join(changes)}"
    # Weights of Gemma count from 0: it multiplies by 1 + weight.
    for offset in (0.0, 1.0):
        for result in get_args(ResultDtype):
            form = RmsNormForm(offset=offset, result=result)
            run = functools.partial(form, eps=eps)
            if all(
                _is_equivalent(original, other, actual, each[1:])
                for original, other, each in zip(*by_mode, probes, strict=True)
                for actual in (_run_probe(run, num_features, *each),)
            ):
                return form
    return "it computes something else than torch's rms_norm"


def why_not_plain(module: nn.Module, eps_names: Iterable[str]) -> str | None:
    """Why a fused pass might not follow what a module is set to later; ``None`` if it would.

    It reads only weight and epsilon, one of ``eps_names``: switches, scales or counters would be ignored.
    """
    buffers = sorted(name for name, _ in module.named_buffers())
    if buffers:
        return f"it has buffers ({', '.join(buffers)}), which a fused pass would not follow"
    safe_names = {*eps_names, *_PLAIN_NAMES}
    members = {name: value for name, value in vars(module).items() if name not in _OWN}
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    of_class = {
        name: value
        for kind in classes
        for name, value in vars(kind).items()
        if isinstance(
            value, (bool, int, float, list, dict, set, torch.Tensor, property, functools.cached_property)
        )
    }
    size = module.get_parameter("weight").numel()
    for name, value in {**of_class, **members}.items():
        if name.startswith(_MARKS) or _is_size(value, size):
            continue
        if name not in safe_names or isinstance(value, (property, functools.cached_property)):
            return f"its attribute {name!r} may change what it computes, and a fused pass would not follow"
    return None


def _is_size(value: object, size: int) -> bool:
    """Returns whether an attribute holds only a shape: D, (D,), or nothing."""
    if isinstance(value, (tuple, list)):
        return list(value) == [size]
    return value is None or (type(value) is int and value == size)


def _module_state(module: nn.Module) -> dict[str, object]:
    # Attributes that a forward pass may set; the mode, which is in ``_OWN``, is left out.
    plain = {name: repr(value) for name, value in vars(module).items() if name not in _OWN}
    return {**plain, **{name: id(value) for name, value in module._buffers.items()}}


def _call_with_weight(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.func.functional_call(module, {"weight": weight}, (x,))


@torch.enable_grad()
def _run_probe(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_features: int,
    leading: tuple[int, ...],
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # No leading dimension has the size D, so a module that normalises another dimension is detected.
    shape = (*(size if size != num_features else size + 3 for size in leading), num_features)
    rows = torch.arange(shape[0]) % len(_ROW_SCALES)  # each row takes the next scale
    scale = torch.tensor(_ROW_SCALES)[rows].reshape(-1, *[1] * len(leading))
    x = (torch.randn(shape, generator=generator) * scale).to(x_dtype).requires_grad_()
    weight = (torch.rand(num_features, generator=generator) + 0.5).to(weight_dtype).requires_grad_()
    towards = torch.randn(shape, generator=generator)  # the incoming gradient
    with random_states_kept():
        result = run(x, weight)
    x_gradient, weight_gradient = torch.autograd.grad((result.float() * towards).sum(), (x, weight))
    return result.detach(), x_gradient, weight_gradient


def _is_equivalent(
    original: tuple[torch.Tensor, ...],
    other_mode: tuple[torch.Tensor, ...],
    fused: tuple[torch.Tensor, ...],
    dtypes: tuple[torch.dtype, ...],
) -> bool:
    """True if all tensors agree but for rounding; the original's are of training and of evaluation."""
    lowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    # The original may round once more than the fused pass, in the lower dtype.
    tolerance = 1e-6 if lowest == torch.float32 else 4 * torch.finfo(lowest).eps
    return all(
        _is_close(each, output, tolerance)
        for of_mode in (original, other_mode)
        for each, output in zip(of_mode, fused, strict=True)
    )


def _is_close(tensor: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Returns whether dtypes are equal, and values within ``tolerance`` of the largest in their row."""
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    tensor, other = tensor.float(), other.float()
    size = other.abs().amax(dim=-1, keepdim=True)  # [..., 1]
    return bool(((tensor - other).abs() <= tolerance * (1 + size)).all())


_PREFIXES: Final = {"torch": "Fused", "liger": "Liger", "apex": "Apex", TRACED: "Traced"}
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "variance_eps")


@dataclass(frozen=True, kw_only=True)
class FusedRmsNorm(Replacement):
    """Hand-written RMSNorms, those of transformers among them, by a fused kernel.

    Attributes:
        kernel: ``torch`` (``torch.nn.functional.rms_norm``), ``liger`` or ``apex``.
    """

    name: str = "fused_rms_norm"
    kernel: str = "torch"
    requirements: Requirements = ANYWHERE

    looks_for = "hand-written RMSNorms"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Returns whether a class not of torch is called an RMSNorm, except on CPUs, where none is fused."""
        if cluster.device_type == "cpu" or not self.requirements.usable_on(cluster):
            return False
        names = classes_in(profile) - {"RMSNorm"}
        return any("RMSNorm" in name and not name.startswith("torch.") for name in names)

    def traced(self, cluster: Cluster) -> Replacement | None:
        """With one operator for the kernel; on CPUs with the operators that torch runs there."""
        if not self.requirements.usable_on(cluster):
            return None
        return self if cluster.device_type == "cpu" else replace(self, kernel=TRACED)

    def concerns(self, model: nn.Module) -> bool:
        """Returns whether a module looks like an RMSNorm."""
        return any(
            "norm" in type(module).__name__.lower() and _is_candidate(module) for module in model.modules()
        )

    def replace(self, model: nn.Module, earlier: Set[nn.Module] = frozenset()) -> ReplacementOutcome:
        """Replaces what computes the same."""
        forms: dict[Any, RmsNormForm | str] = {}

        def make(module: nn.Module) -> nn.Module | str:
            reason = why_not_plain(module, _EPS_NAMES)
            if reason is not None:
                return reason
            key = _module_key(module)  # equal modules are tried once
            eps_name = _eps_name(module)
            assert eps_name is not None
            if key not in forms:
                forms[key] = form_of(module, _get_weight(module).numel(), getattr(module, eps_name))
            form = forms[key]
            if isinstance(form, str):
                return form
            return derive(module, _PREFIXES[self.kernel], _rms_norm_forward, form, eps_name, self.kernel)

        outcome = replace_modules(model, _is_candidate, make, earlier)
        if self.kernel == "torch":
            _count_fused(outcome, nn.RMSNorm)
        return outcome


@dataclass(frozen=True, kw_only=True)
class FusedLayerNorm(Replacement):
    """``nn.LayerNorm``: by apex, or by torch, whose kernel is fused already, which it says.

    Attributes:
        kernel: ``torch`` or ``apex``.
    """

    name: str = "fused_layer_norm"
    kernel: str = "torch"
    requirements: Requirements = ANYWHERE

    looks_for = "nn.LayerNorm modules"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """True if apex is usable and the model has an ``nn.LayerNorm``."""
        usable = self.kernel == "apex" and self.requirements.usable_on(cluster)
        return usable and "torch.nn.modules.normalization.LayerNorm" in classes_in(profile)

    def concerns(self, model: nn.Module) -> bool:
        """True if the model has an ``nn.LayerNorm``."""
        return any(type(module) is nn.LayerNorm for module in model.modules())

    def replace(self, model: nn.Module, earlier: Set[nn.Module] = frozenset()) -> ReplacementOutcome:
        """Replaces or counts the layer norms."""
        if self.kernel == "apex":
            return replace_modules(
                model,
                lambda module: type(module) is nn.LayerNorm,
                lambda module: derive(module, _PREFIXES[self.kernel], _layer_norm_forward),
                earlier,
            )
        outcome = ReplacementOutcome(model=model)
        _count_fused(outcome, nn.LayerNorm)
        return outcome


def _count_fused(outcome: ReplacementOutcome, kind: type[nn.Module]) -> None:
    count = sum(type(module) is kind for module in outcome.model.modules())
    if count:
        outcome.kept[f"{kind.__name__}: torch's fused kernel already"] += count


def _is_candidate(module: nn.Module) -> bool:
    """A leaf with a weight [D], an epsilon, no other parameter, and one argument: perhaps an RMSNorm."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if names != ["weight"] or any(True for _ in module.children()):
        return False
    if _get_weight(module).dim() != 1 or _eps_name(module) is None:
        return False
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, Derived):
        return False
    arguments = list(inspect.signature(type(module).forward).parameters.values())
    return len(arguments) == 2 and arguments[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def _get_weight(module: nn.Module) -> torch.Tensor:
    return module.get_parameter("weight")


def _module_key(module: nn.Module) -> Any:
    plain = sorted((name, repr(value)) for name, value in vars(module).items() if not name.startswith("_"))
    return type(module), tuple(plain), _get_weight(module).shape  # modules with one key compute the same


def _rms_norm_forward(source: Any, form: RmsNormForm, eps_name: str, kernel: str) -> Forward:
    def forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())  # called as the original was, whatever its argument's name
        return form(x, self.weight, getattr(self, eps_name), kernel)

    return forward


def _layer_norm_forward(source: Any) -> Forward:
    def forward(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:  # as LayerNorm names it
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    return forward
