"""Normalisations: hand-written ones become torch's fused kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Set
from typing import Any

import torch
from torch import nn

from opt_lib._replacements._base import Outcome, Replacement
from opt_lib._replacements._making import take_over
from opt_lib._replacements._pair import replace_modules
from opt_lib._replacements._rms_norm import RmsNormForm, form_of

__all__ = ["FusedLayerNorm", "FusedRmsNorm"]

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "variance_eps")


class FusedRmsNorm(Replacement):
    """Hand-written RMSNorms, those of transformers among them, by ``torch.nn.functional.rms_norm``."""

    name = "fused_rms_norm"

    @property
    def looks_for(self) -> str:
        """Hand-written normalisations."""
        return "hand-written RMSNorms"

    def wanted_among(self, class_names: Set[str]) -> bool:
        """Whether a class other than torch's own is called an RMSNorm."""
        return any("RMSNorm" in name and not name.startswith("torch.") for name in class_names - {"RMSNorm"})

    def replace(self, model: nn.Module) -> Outcome:
        """Replaces what computes the same."""
        forms: dict[Any, RmsNormForm | str] = {}

        def make(module: nn.Module) -> nn.Module | str:
            key = _settings(module)
            eps_name = _eps_name(module)
            assert eps_name is not None
            if key not in forms:
                forms[key] = form_of(module, _weight(module).numel(), getattr(module, eps_name))
            form = forms[key]
            if isinstance(form, str):
                return form
            source: Any = type(module)
            return take_over(module, _fused_class(source, form, eps_name))

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
    if _weight(module).dim() != 1 or _eps_name(module) is None:
        return False
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, _Fused):
        return False
    arguments = list(inspect.signature(type(module).forward).parameters.values())
    return len(arguments) == 2 and arguments[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def _weight(module: nn.Module) -> torch.Tensor:
    return module.get_parameter("weight")


def _settings(module: nn.Module) -> Any:
    """What decides what a module computes: its class, its plain attributes, its size."""
    plain = sorted((name, repr(value)) for name, value in vars(module).items() if not name.startswith("_"))
    return type(module), tuple(plain), _weight(module).shape


class _Fused(nn.Module):
    """Marks the classes made below."""


@functools.cache
def _fused_class(source: Any, form: RmsNormForm, eps_name: str) -> type[nn.Module]:
    """A subclass of ``source`` with the fused forward pass.

    Being a subclass, its modules are still chosen by the source's name and initialised by the model's own
    rules, and their attributes are the source's.
    """

    def forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())  # called as the original was, whatever its argument's name
        return form(x, self.weight, getattr(self, eps_name))

    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _rebuild, (source, form, eps_name), vars(self)

    return type(
        f"Fused{source.__name__}",
        (_Fused, source),
        {"__doc__": f"{source.__name__} by torch's fused kernel.", "forward": forward, "__reduce__": reduce},
    )


def _rebuild(source: Any, form: RmsNormForm, eps_name: str) -> nn.Module:
    """An empty module for pickle and copy, which cannot find a class that is made at run time."""
    kind = _fused_class(source, form, eps_name)
    return kind.__new__(kind)
