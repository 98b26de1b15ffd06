"""Normalisations: hand-written ones become fused kernels, of torch, Liger or apex."""

from __future__ import annotations

import inspect
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile
from opt_lib._replacements._base import ANYWHERE, Outcome, Replacement, Requirements, classes_in
from opt_lib._replacements._derived import Derived, Forward, derive
from opt_lib._replacements._kernels import layer_norm
from opt_lib._replacements._pair import replace_modules
from opt_lib._replacements._rms_norm import RmsNormForm, form_of, why_not_plain

__all__ = ["FusedLayerNorm", "FusedRmsNorm"]

_PREFIXES: Final = {"torch": "Fused", "liger": "Liger", "apex": "Apex"}
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "variance_eps")


@dataclass(frozen=True, kw_only=True)
class FusedRmsNorm(Replacement):
    """Hand-written RMSNorms, those of transformers among them, by a fused kernel.

    Attributes:
        name: as written in ``include`` and ``exclude``.
        kernel: ``torch`` (``torch.nn.functional.rms_norm``), ``liger`` or ``apex``.
        requirements: what the kernel needs of a job.
    """

    name: str = "fused_rms_norm"
    kernel: str = "torch"
    requirements: Requirements = ANYWHERE

    @property
    def looks_for(self) -> str:
        """Hand-written normalisations."""
        return "hand-written RMSNorms"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Whether a class other than torch's own is called an RMSNorm, on a device for which kernels are fused.

        On CPUs torch computes ``rms_norm`` by the operators that it is written with.
        """
        if cluster.device_type == "cpu" or not self.requirements.usable_on(cluster):
            return False
        names = classes_in(profile) - {"RMSNorm"}
        return any("RMSNorm" in name and not name.startswith("torch.") for name in names)

    def concerns(self, model: nn.Module) -> bool:
        """Whether a module looks like an RMSNorm."""
        return any(
            "norm" in type(module).__name__.lower() and _is_candidate(module) for module in model.modules()
        )

    def replace(self, model: nn.Module, spared: Set[nn.Module] = frozenset()) -> Outcome:
        """Replaces what computes the same."""
        forms: dict[Any, RmsNormForm | str] = {}

        def make(module: nn.Module) -> nn.Module | str:
            reason = why_not_plain(module, _EPS_NAMES)
            if reason is not None:
                return reason
            key = _settings(module)
            eps_name = _eps_name(module)
            assert eps_name is not None
            if key not in forms:
                forms[key] = form_of(module, _weight(module).numel(), getattr(module, eps_name))
            form = forms[key]
            if isinstance(form, str):
                return form
            return derive(module, _PREFIXES[self.kernel], _rms_norm_forward, form, eps_name, self.kernel)

        outcome = replace_modules(model, _is_candidate, make, spared)
        if self.kernel == "torch":
            _count_fused(outcome, nn.RMSNorm)
        return outcome


@dataclass(frozen=True, kw_only=True)
class FusedLayerNorm(Replacement):
    """``nn.LayerNorm``: by apex, or by torch, whose kernel is fused already, which it says.

    Attributes:
        name: as written in ``include`` and ``exclude``.
        kernel: ``torch`` or ``apex``.
        requirements: what the kernel needs of a job.
    """

    name: str = "fused_layer_norm"
    kernel: str = "torch"
    requirements: Requirements = ANYWHERE

    @property
    def looks_for(self) -> str:
        """torch's own class."""
        return "nn.LayerNorm modules"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Whether apex is usable and there is one."""
        usable = self.kernel == "apex" and self.requirements.usable_on(cluster)
        return usable and "torch.nn.modules.normalization.LayerNorm" in classes_in(profile)

    def concerns(self, model: nn.Module) -> bool:
        """Whether there is one."""
        return any(type(module) is nn.LayerNorm for module in model.modules())

    def replace(self, model: nn.Module, spared: Set[nn.Module] = frozenset()) -> Outcome:
        """Replaces them, or counts them."""
        if self.kernel == "apex":
            return replace_modules(
                model,
                lambda module: type(module) is nn.LayerNorm,
                lambda module: derive(module, _PREFIXES[self.kernel], _layer_norm_forward),
                spared,
            )
        outcome = Outcome(model=model)
        _count_fused(outcome, nn.LayerNorm)
        return outcome


def _count_fused(outcome: Outcome, kind: type[nn.Module]) -> None:
    count = sum(type(module) is kind for module in outcome.model.modules())
    if count:
        outcome.kept[f"{kind.__name__}: torch's fused kernel already"] += count


def _is_candidate(module: nn.Module) -> bool:
    """A leaf with a weight [D], an epsilon, no other parameter, and one argument: perhaps an RMSNorm."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if names != ["weight"] or any(True for _ in module.children()):
        return False
    if _weight(module).dim() != 1 or _eps_name(module) is None:
        return False
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, Derived):
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


def _rms_norm_forward(source: Any, form: RmsNormForm, eps_name: str, kernel: str) -> Forward:
    def forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())  # called as the original was, whatever its argument's name
        return form(x, self.weight, getattr(self, eps_name), kernel)

    return forward


def _layer_norm_forward(source: Any) -> Forward:
    def forward(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:  # as LayerNorm names it
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    return forward
