"""The plan that a model brings along, as those of transformers do."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.sharding._tensor_plan import TensorPlan, meant, style_named

__all__ = ["model_plan"]

_WHOLE = {"replicated_with_grad_allreduce", "replicate", "all_reduce"}
"""Styles of modules that stay whole; whose gradients are summed over ranks is found by the self-test."""


def model_plan(model: nn.Module) -> TensorPlan | None:
    """The model's own plan; ``None`` if it has none, or one with styles that are not known here.

    Entries of parameters and of experts are left out: experts stay whole along the tensor axis.
    """
    own = getattr(model, "tp_plan", None)
    if not isinstance(own, Mapping) or not own:
        return None
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    parts: dict[str, tuple[int, ...]] = {}
    for pattern, style in own.items():
        layers = [modules[path] for path in meant(pattern, modules) if kind_of(modules[path]) is not None]
        if style in _WHOLE or not layers:
            continue
        try:
            styles[pattern] = style_named(style)
        except ValueError:
            return None
        if style == "packed_colwise":
            kind = kind_of(layers[0])
            assert kind is not None
            half = kind.sizes(layers[0])[0] // 2
            parts[pattern] = (half, half)
    return TensorPlan(styles=styles, parts=parts, where="model") if styles else None
