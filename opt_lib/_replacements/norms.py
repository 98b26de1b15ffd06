"""Normalisations: hand-written ones become torch's fused kernels.

Legend: D features.

Models write root-mean-square normalisation in many ways that differ in details no name tells: whether the
weight counts from 0 or from 1, and the dtype of the result where input and weight differ. So a class is
judged by what it computes: it is called on a small input, once per class and settings, and replaced only by a
form that agrees with it in values, gradients and dtypes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from opt_lib._replacements._base import Outcome, Replacement
from opt_lib._replacements._making import take_over
from opt_lib._replacements._pair import replace_modules

__all__ = ["FusedLayerNorm", "FusedRmsNorm", "RmsNormForm"]

ResultDtype = Literal["promoted", "input", "weight"]
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "variance_eps")
_PROBED_DTYPES = (torch.float32, torch.bfloat16)
_ROW_SCALES = (1e-3, 1.0, 30.0)
"""Rows of these sizes: in the smallest, the epsilon decides."""


@dataclass(frozen=True, kw_only=True)
class RmsNormForm:
    """One way to write ``x / rms(x) * weight``.

    Attributes:
        offset: what is added to the weight.
        result: the dtype of the result, where input and weight differ.
        eps_name: the attribute that holds the epsilon.
    """

    offset: float
    result: ResultDtype
    eps_name: str

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalises the last dimension of ``x`` [..., D] by torch's fused kernel; ``weight`` is [D]."""
        together = torch.promote_types(x.dtype, weight.dtype)
        result = {"promoted": together, "input": x.dtype, "weight": weight.dtype}[self.result]
        if self.offset:
            # 1 + weight has no room for a small weight in half precision.
            together, weight = torch.float32, weight.float() + self.offset
        return F.rms_norm(x.to(together), weight.shape, weight.to(together), eps).to(result)


class FusedRmsNorm(Replacement):
    """Hand-written RMSNorms, those of transformers among them, by ``torch.nn.functional.rms_norm``."""

    name = "fused_rms_norm"

    @property
    def looks_for(self) -> str:
        """Hand-written normalisations."""
        return "hand-written RMSNorms"

    def replace(self, model: nn.Module) -> Outcome:
        """Replaces what computes the same."""
        forms: dict[Any, RmsNormForm | str] = {}

        def make(module: nn.Module) -> nn.Module | str:
            key = _settings(module)
            if key not in forms:
                forms[key] = _form_of(module)
            form = forms[key]
            return form if isinstance(form, str) else take_over(module, _fused_class(type(module), form))

        outcome = replace_modules(model, _is_candidate, make)
        _count_fused(outcome, nn.RMSNorm)
        return outcome


class FusedLayerNorm(Replacement):
    """``nn.LayerNorm`` is a fused kernel already; says so."""

    name = "fused_layer_norm"

    @property
    def looks_for(self) -> str:
        """torch's own class."""
        return "nn.LayerNorm modules"

    def replace(self, model: nn.Module) -> Outcome:
        """Counts them."""
        outcome = Outcome(model=model)
        _count_fused(outcome, nn.LayerNorm)
        return outcome


def _count_fused(outcome: Outcome, kind: type[nn.Module]) -> None:
    count = sum(type(module) is kind for module in outcome.model.modules())
    if count:
        outcome.kept[f"{kind.__name__}: torch's fused kernel already"] += count


def _is_candidate(module: nn.Module) -> bool:
    """A leaf with a weight [D], an epsilon, nothing else, and one argument: perhaps an RMSNorm."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if names != ["weight"] or any(module.buffers()) or any(module.children()):
        return False
    if module._parameters["weight"].dim() != 1 or _eps_name(module) is None:  # type: ignore[union-attr]
        return False
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, _Fused):
        return False
    arguments = list(inspect.signature(type(module).forward).parameters.values())
    return len(arguments) == 2 and arguments[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def _settings(module: nn.Module) -> Any:
    """What decides what a module computes: its class, its plain attributes, its size."""
    plain = sorted((name, repr(value)) for name, value in vars(module).items() if not name.startswith("_"))
    return type(module), tuple(plain), module.weight.shape


def _form_of(module: nn.Module) -> RmsNormForm | str:
    """The form that computes what ``module`` does, or why there is none."""
    eps_name = _eps_name(module)
    assert eps_name is not None
    eps = getattr(module, eps_name)
    num_features = module.weight.shape[0]
    try:
        expected = [_probe(functools.partial(_call, module), num_features, *pair) for pair in _dtype_pairs()]
    except Exception as error:
        return f"it could not be tried on a small input ({type(error).__name__})"
    for offset in (0.0, 1.0):
        for result in get_args(ResultDtype):
            form = RmsNormForm(offset=offset, result=result, eps_name=eps_name)
            run = functools.partial(form, eps=eps)
            if all(
                _agree(wanted, _probe(run, num_features, *pair))
                for wanted, pair in zip(expected, _dtype_pairs(), strict=True)
            ):
                return form
    return "it computes something else than torch's rms_norm"


def _dtype_pairs() -> Iterable[tuple[torch.dtype, torch.dtype]]:
    """Of input and weight."""
    return ((x, weight) for x in _PROBED_DTYPES for weight in _PROBED_DTYPES)


def _call(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.func.functional_call(module, {"weight": weight}, (x,))


@torch.enable_grad()  # type: ignore[untyped-decorator]
def _probe(
    run: Any, num_features: int, x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result on a small input on the CPU, and the gradients of input and weight."""
    generator = torch.Generator().manual_seed(0)
    # Two leading dimensions, and neither of size D: a module that normalises another one is found out.
    shape = (len(_ROW_SCALES), 2 if num_features != 2 else 4, num_features)
    scale = torch.tensor(_ROW_SCALES)[:, None, None]
    x = (torch.randn(shape, generator=generator) * scale).to(x_dtype).requires_grad_()
    weight = (torch.rand(num_features, generator=generator) + 0.5).to(weight_dtype).requires_grad_()
    towards = torch.randn(shape, generator=generator)
    with torch.random.fork_rng(devices=[]):
        result = run(x, weight)
    gradients = torch.autograd.grad((result.float() * towards).sum(), (x, weight))
    return result.detach(), *gradients


def _agree(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(_close(first, second) for first, second in zip(one, other, strict=True))


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding, in units of a row's size: the original may round once more than the kernel."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    tolerance = 1e-6 if one.dtype == torch.float32 else 4 * torch.finfo(one.dtype).eps
    one, other = one.float(), other.float()
    size = other.abs().amax(dim=-1, keepdim=True)
    return bool(((one - other).abs() <= tolerance * (1 + size)).all())


class _Fused(nn.Module):
    """Marks the classes made below."""


@functools.cache
def _fused_class(source: type[nn.Module], form: RmsNormForm) -> type[nn.Module]:
    """A subclass of ``source`` with the fused forward pass.

    Being a subclass, its modules are still chosen by the source's name and initialised by the model's own
    rules, and their attributes are the source's.
    """

    def forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())  # called as the original was, whatever its argument's name
        return form(x, self.weight, getattr(self, form.eps_name))

    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _rebuild, (source, form), vars(self)

    return type(
        f"Fused{source.__name__}",
        (_Fused, source),
        {"__doc__": f"{source.__name__} by torch's fused kernel.", "forward": forward, "__reduce__": reduce},
    )


def _rebuild(source: type[nn.Module], form: RmsNormForm) -> nn.Module:
    """An empty module for pickle and copy, which cannot find a class that is made at run time."""
    kind = _fused_class(source, form)
    return kind.__new__(kind)
