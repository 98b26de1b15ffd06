"""Liger's rotary embeddings for transformers' attention, and gated MLPs ``down(silu(gate(x)) * up(x))``.

Attention modules of transformers call ``apply_rotary_pos_emb`` of their file. A replaced module runs the same
code with another function under this name; neither the file nor its class is altered.

Legend: B samples, H heads, T tokens, D features (of a head, or of an MLP's input), I inner features.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile
from opt_lib._replacements.base import ModuleReplacement, Replacement, Requirements, classes_in
from opt_lib._replacements.kernels import LIGER, TRACED, rotate, silu_mul
from opt_lib._replacements.making import Derived, Forward, derive

_FUNCTION: Final = "apply_rotary_pos_emb"


@dataclass(frozen=True, kw_only=True)
class _Liger(ModuleReplacement):
    requirements: Requirements = LIGER
    kernel: str = "liger"  # or ``traced`` in a copy of a model that is traced for its cost

    def traced(self, cluster: Cluster) -> Replacement | None:
        """With one operator for each kernel."""
        return replace(self, kernel=TRACED) if self.requirements.usable_on(cluster) else None


@dataclass(frozen=True, kw_only=True)
class LigerRope(_Liger):
    """Rotary embeddings that turn the two halves of a head against each other, as Llama's do."""

    name: str = "liger_rope"

    looks_for = "attention modules of transformers with rotary embeddings"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Returns whether Liger is usable and a class has the usual name."""
        return self.requirements.usable_on(cluster) and any(
            name.startswith("transformers.") and name.endswith("Attention") for name in classes_in(profile)
        )

    def wants(self, module: nn.Module) -> bool:
        """True for an attention module with rotary embeddings."""
        return _rotation_of(type(module)) is not None

    def make(self, module: nn.Module) -> nn.Module | str:
        """The module with Liger's function, if its own computes the same."""
        rotation = _rotation_of(type(module))
        assert rotation is not None
        return _why_not_rope(rotation) or derive(module, "LigerRope", _rope_forward, self.kernel)


def _rotation_of(kind: type[nn.Module]) -> Callable[..., Any] | None:
    forward = kind.forward
    # Only a plain function has code and globals of its own; derived classes are replaced already.
    if issubclass(kind, Derived) or not isinstance(forward, types.FunctionType):
        return None
    if not kind.__module__.startswith("transformers.") or _FUNCTION not in forward.__code__.co_names:
        return None
    rotation = forward.__globals__.get(_FUNCTION)
    return rotation if callable(rotation) else None


@functools.cache
def _why_not_rope(rotation: Callable[..., Any]) -> str | None:
    if list(inspect.signature(rotation).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return f"its {_FUNCTION} takes other arguments"
    generator = torch.Generator().manual_seed(0)
    # q [2, 4, 3, 8] and k [2, 2, 3, 8]: with grouped queries k has fewer heads.
    q, k = torch.randn(2, 4, 3, 8, generator=generator), torch.randn(2, 2, 3, 8, generator=generator)
    half = torch.randn(2, 3, 4, generator=generator)  # angles [B, T, D / 2]: both halves of a head share them
    cos, sin = (torch.cat([f(half)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    try:
        with torch.no_grad():
            actual = rotation(q, k, cos, sin)
    except Exception as error:
        return f"its {_FUNCTION} could not be tried on a small input ({type(error).__name__})"
    reference = (_apply_rotation(q, cos, sin), _apply_rotation(k, cos, sin))
    alike = len(actual) == 2 and all(
        tensor.shape == other.shape and torch.allclose(tensor, other, atol=1e-6)
        for tensor, other in zip(actual, reference, strict=True)
    )
    return None if alike else f"its {_FUNCTION} computes something else than Liger's"


def _apply_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D] turned by the angles of cos and sin [B, T, D], whose halves are equal."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _rope_forward(source: Any, kernel: str) -> Forward:
    old = source.forward
    original = old.__globals__[_FUNCTION]

    def rotation(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # heads in another dimension
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(kernel, original, q, k, cos=cos, sin=sin)

    # Without the file's name torch.compile guards these globals, not those of the file.
    others = {name: value for name, value in old.__globals__.items() if name != "__name__"}
    new = types.FunctionType(
        old.__code__, {**others, _FUNCTION: rotation}, old.__name__, old.__defaults__, old.__closure__
    )
    new.__kwdefaults__ = old.__kwdefaults__  # no argument of FunctionType before Python 3.13
    return functools.wraps(old)(new)


_LAYERS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # names of gate, up, down

_D, _I = 4, 6  # of the small module that is tried


@dataclass(frozen=True, kw_only=True)
class LigerSwiglu(_Liger):
    """MLPs of Llama's kind. What such a module computes is tried on a small input before it is replaced."""

    name: str = "liger_swiglu"

    looks_for = "MLPs with a gate"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Returns whether Liger is usable and a class has the usual name."""
        return self.requirements.usable_on(cluster) and any(
            name.endswith("MLP") for name in classes_in(profile)
        )

    def wants(self, module: nn.Module) -> bool:
        """True for a module with the three layers."""
        return _layers_of(module) is not None

    def make(self, module: nn.Module) -> nn.Module | str:
        """The module with a fused forward pass, if that computes the same."""
        layers = _layers_of(module)
        assert layers is not None
        return _why_not_swiglu(module, layers) or derive(
            module, "Liger", _swiglu_forward, layers, self.kernel
        )


def _layers_of(module: nn.Module) -> tuple[str, str, str] | None:
    # A fused pass would not see a parameter of the module's own, such as a scale of its result.
    if isinstance(module, Derived) or any(True for _ in module.parameters(recurse=False)):
        return None
    arguments = list(inspect.signature(type(module).forward).parameters)
    if len(arguments) != 2:  # self and x
        return None
    for names in _LAYERS:
        if all(type(getattr(module, name, None)) is nn.Linear for name in names):
            return names
    return None


def _why_not_swiglu(module: nn.Module, layers: tuple[str, str, str]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    weights = _small_weights(module, layers, generator)
    others = {name for name, _ in module.named_parameters()} - weights.keys()
    if others or any(True for _ in module.buffers()):
        return "it has other parameters or buffers than those of its three layers"
    x = torch.randn(2, 3, _D, generator=generator)
    try:
        # What a user's forward sets on its module stays on this copy; the call replaces its shared weights.
        trial = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
        with torch.no_grad(), random_states_kept():
            actual = torch.func.functional_call(trial, weights, (x,))
            again = torch.func.functional_call(trial, weights, (x,))
    except Exception as error:
        return f"it could not be tried on a small input ({type(error).__name__})"
    gate, up, down = layers
    reference = _apply_linear(
        F.silu(_apply_linear(x, weights, gate)) * _apply_linear(x, weights, up), weights, down
    )
    # Two calls must agree exactly, else something random is in it; the tolerance is for rounding.
    same = (
        isinstance(actual, torch.Tensor)
        and actual.shape == reference.shape
        and torch.equal(actual, again)
        and torch.allclose(actual, reference, rtol=1e-6, atol=1e-6)
    )
    return None if same else "it computes something else than down(silu(gate(x)) * up(x))"


def _small_weights(
    module: nn.Module, layers: tuple[str, str, str], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    sizes = dict(zip(layers, ((_I, _D), (_I, _D), (_D, _I)), strict=True))  # gate, up, down
    weights = {}
    for name, size in sizes.items():
        weights[f"{name}.weight"] = torch.randn(size, generator=generator)
        if getattr(module, name).bias is not None:
            weights[f"{name}.bias"] = torch.randn(size[0], generator=generator)
    return weights


def _apply_linear(x: torch.Tensor, weights: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    return F.linear(x, weights[f"{layer}.weight"], weights.get(f"{layer}.bias"))


def _swiglu_forward(source: Any, layers: tuple[str, str, str], kernel: str) -> Forward:
    gate, up, down = layers

    def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())  # called as the original was, whatever its argument's name
        inner = silu_mul(kernel, getattr(self, gate)(x), getattr(self, up)(x))
        result: torch.Tensor = getattr(self, down)(inner)
        return result

    return forward
