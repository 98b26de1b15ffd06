"""Gated MLPs, ``down(silu(gate(x)) * up(x))``, whose activation and product become one kernel of Liger.

Legend: B samples, T tokens, D features, I inner features.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile
from opt_lib._replacements._base import Outcome, Replacement, Requirements, classes_in
from opt_lib._replacements._derived import Derived, Forward, derive
from opt_lib._replacements._kernels import LIGER, silu_mul
from opt_lib._replacements._pair import replace_modules

__all__ = ["LigerSwiglu"]

_LAYERS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""How models name the three layers: gate, up, down."""

_D, _I = 4, 6


@dataclass(frozen=True, kw_only=True)
class LigerSwiglu(Replacement):
    """MLPs of Llama's kind. What such a module computes is tried on a small input before it is replaced."""

    name: str = "liger_swiglu"
    requirements: Requirements = LIGER

    @property
    def looks_for(self) -> str:
        """Gated MLPs."""
        return "MLPs with a gate"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Whether Liger is usable and a class has the usual name."""
        return self.requirements.usable_on(cluster) and any(
            name.endswith("MLP") for name in classes_in(profile)
        )

    def concerns(self, model: nn.Module) -> bool:
        """Whether a module has the three layers."""
        return any(_layers_of(module) is not None for module in model.modules())

    def replace(self, model: nn.Module, spared: Set[nn.Module] = frozenset()) -> Outcome:
        """Replaces what computes the same."""
        return replace_modules(model, lambda module: _layers_of(module) is not None, _make, spared)


def _make(module: nn.Module) -> nn.Module | str:
    layers = _layers_of(module)
    assert layers is not None
    reason = _why_not(module, layers)
    return reason if reason is not None else derive(module, "Liger", _forward, layers)


def _layers_of(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of its gate, up and down layers, if it has the three, one argument and no parameter of its own."""
    if isinstance(module, Derived) or any(True for _ in module.parameters(recurse=False)):
        return None
    arguments = list(inspect.signature(type(module).forward).parameters)
    if len(arguments) != 2:
        return None
    for names in _LAYERS:
        if all(type(getattr(module, name, None)) is nn.Linear for name in names):
            return names
    return None


def _why_not(module: nn.Module, layers: tuple[str, str, str]) -> str | None:
    """Why it does not compute ``down(silu(gate(x)) * up(x))``; ``None`` if it does."""
    generator = torch.Generator().manual_seed(0)
    weights = _small_weights(module, layers, generator)
    others = {name for name, _ in module.named_parameters()} - weights.keys()
    if others or any(True for _ in module.buffers()):
        return "it has other parameters or buffers than those of its three layers"
    x = torch.randn(2, 3, _D, generator=generator)
    try:
        # What a user's forward leaves on its module stays on a copy, which shares the weights: others stand for them.
        tried = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            actual = torch.func.functional_call(tried, weights, (x,))
            again = torch.func.functional_call(tried, weights, (x,))
    except Exception as error:
        return f"it could not be tried on a small input ({type(error).__name__})"
    gate, up, down = layers
    wanted = _linear(F.silu(_linear(x, weights, gate)) * _linear(x, weights, up), weights, down)
    same = (
        isinstance(actual, torch.Tensor)
        and actual.shape == wanted.shape
        and torch.equal(actual, again)
        and torch.allclose(actual, wanted, rtol=1e-6, atol=1e-6)
    )
    return None if same else "it computes something else than down(silu(gate(x)) * up(x))"


def _small_weights(
    module: nn.Module, layers: tuple[str, str, str], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Weights of a module of the same kind with D=4 and I=6."""
    sizes = dict(zip(layers, ((_I, _D), (_I, _D), (_D, _I)), strict=True))
    weights = {}
    for name, size in sizes.items():
        weights[f"{name}.weight"] = torch.randn(size, generator=generator)
        if getattr(module, name).bias is not None:
            weights[f"{name}.bias"] = torch.randn(size[0], generator=generator)
    return weights


def _linear(x: torch.Tensor, weights: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    return F.linear(x, weights[f"{layer}.weight"], weights.get(f"{layer}.bias"))


def _forward(source: Any, layers: tuple[str, str, str]) -> Forward:
    gate, up, down = layers

    def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())  # called as the original was, whatever its argument's name
        inner = silu_mul(getattr(self, gate)(x), getattr(self, up)(x))
        result: torch.Tensor = getattr(self, down)(inner)
        return result

    return forward
