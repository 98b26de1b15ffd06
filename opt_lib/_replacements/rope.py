"""Rotary embeddings of transformers' attention modules, by Liger's kernel.

Legend: B samples, H heads, T tokens, D features of a head.

Attention modules of transformers call a function ``apply_rotary_pos_emb`` of their file. A module that is replaced
has the same forward pass, compiled from the same source, in which this one name means another function: neither the
file nor its class is altered.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile
from opt_lib._replacements._base import Outcome, Replacement, Requirements, classes_in
from opt_lib._replacements._derived import Derived, Forward, derive
from opt_lib._replacements._kernels import LIGER, rotate
from opt_lib._replacements._pair import replace_modules

__all__ = ["LigerRope"]

_FUNCTION: Final = "apply_rotary_pos_emb"


@dataclass(frozen=True, kw_only=True)
class LigerRope(Replacement):
    """Rotary embeddings that turn the two halves of a head against each other, as Llama's do."""

    name: str = "liger_rope"
    requirements: Requirements = LIGER

    @property
    def looks_for(self) -> str:
        """Attention with rotary embeddings."""
        return "attention modules of transformers with rotary embeddings"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Whether Liger is usable and a class has the usual name."""
        return self.requirements.usable_on(cluster) and any(
            name.startswith("transformers.") and name.endswith("Attention") for name in classes_in(profile)
        )

    def concerns(self, model: nn.Module) -> bool:
        """Whether an attention module rotates."""
        return any(_rotation_of(type(module)) is not None for module in model.modules())

    def replace(self, model: nn.Module, spared: Set[nn.Module] = frozenset()) -> Outcome:
        """Replaces the function in every attention module whose function computes the same."""
        return replace_modules(model, lambda module: _rotation_of(type(module)) is not None, _make, spared)


def _make(module: nn.Module) -> nn.Module | str:
    rotation = _rotation_of(type(module))
    assert rotation is not None
    reason = _why_not(rotation)
    return reason if reason is not None else derive(module, "LigerRope", _forward)


def _rotation_of(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The function by which the forward pass of a class of transformers rotates; ``None`` if it has none."""
    forward = kind.forward
    if issubclass(kind, Derived) or not isinstance(forward, types.FunctionType):
        return None
    if not kind.__module__.startswith("transformers.") or _FUNCTION not in forward.__code__.co_names:
        return None
    rotation = forward.__globals__.get(_FUNCTION)
    return rotation if callable(rotation) else None


@functools.cache
def _why_not(rotation: Callable[..., Any]) -> str | None:
    """Why it is not the rotation that Liger computes, as tried on a small input; ``None`` if it is."""
    if list(inspect.signature(rotation).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return f"its {_FUNCTION} takes other arguments"
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 3, 8, generator=generator), torch.randn(2, 2, 3, 8, generator=generator)
    half = torch.randn(2, 3, 4, generator=generator)
    cos, sin = (torch.cat([f(half)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    try:
        with torch.no_grad():
            actual = rotation(q, k, cos, sin)
    except Exception as error:
        return f"its {_FUNCTION} could not be tried on a small input ({type(error).__name__})"
    wanted = (_rotated(q, cos, sin), _rotated(k, cos, sin))
    alike = len(actual) == 2 and all(
        one.shape == other.shape and torch.allclose(one, other, atol=1e-6)
        for one, other in zip(actual, wanted, strict=True)
    )
    return None if alike else f"its {_FUNCTION} computes something else than Liger's"


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D] turned by the angles of cos and sin [B, T, D], whose halves are equal."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _forward(source: Any) -> Forward:
    old = source.forward
    original = old.__globals__[_FUNCTION]

    def rotation(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # heads in another dimension
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(original, q, k, cos, sin)

    new = types.FunctionType(
        old.__code__,
        {**old.__globals__, _FUNCTION: rotation},
        old.__name__,
        old.__defaults__,
        old.__closure__,
    )
    new.__kwdefaults__ = old.__kwdefaults__
    return functools.wraps(old)(new)
