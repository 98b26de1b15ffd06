"""Attention of transformers models, switched for all modules by transformers' own public function."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile
from opt_lib._replacements.base import ANYWHERE, Replacement, ReplacementOutcome, Requirements, classes_in

_FUSED: Final = "scaled_dot_product"


@dataclass(frozen=True, kw_only=True)
class AttentionSwitch(Replacement):
    """Switches transformers models to another implementation of attention.

    Models that run an implementation not in ``switches`` are left alone: somebody has chosen it. So are
    models whose config asks for the attention weights, which only eager attention returns.

    Attributes:
        implementation: the name that ``set_attn_implementation`` takes.
        switches: the implementations that it takes over from.
    """

    name: str
    implementation: str
    requirements: Requirements = ANYWHERE
    switches: tuple[str, ...] = ("eager",)

    looks_for = "transformers models"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """True if it is usable and the profile shows a transformers attention that it replaces."""
        if not self.requirements.usable_on(cluster) or not _holds_transformers(profile):
            return False
        ran = _operator_names(profile)
        # Eager attention writes its softmax out; a fused operator holds it.
        eager = "aten._softmax" in ran and not any(_FUSED in name for name in ran)
        return ("eager" in self.switches and eager) or (
            "sdpa" in self.switches and any(_FUSED in name for name in ran)
        )

    def concerns(self, model: nn.Module) -> bool:
        """True if a transformers model runs one of the implementations that it replaces."""
        return any(_current_attention(part) in self.switches for part in _pretrained_models(model))

    def replace(self, model: nn.Module, earlier: Set[nn.Module] = frozenset()) -> ReplacementOutcome:
        """Switches every model of transformers in ``model``."""
        outcome = ReplacementOutcome(model=model)
        for inner in _outermost_models(model):
            pairs = [(part, _current_attention(part)) for part in _one_a_config(inner)]
            old = [(part, was) for part, was in pairs if was in self.switches]
            # transformers switches a model and all models inside it at once, so one reason is for all.
            reason = self._refusal_reason(inner, [part for part, _ in old]) or self._switch_attention(inner)
            for part, was in old:
                if reason is None and _current_attention(part) == self.implementation:
                    outcome.replaced[f"{was} attention of {_class_name(part)} → {self.implementation}"] += 1
                else:
                    why = reason or "transformers cannot switch it"
                    outcome.kept[f"{_class_name(part)}: stays {was}, {why}"] += 1
            if not old:
                outcome.kept[f"{_class_name(inner)}: runs {_current_attention(inner)} attention already"] += 1
        return outcome

    def _refusal_reason(self, model: nn.Module, old: list[Any]) -> str | None:
        if not old:
            return "there is nothing to switch"
        if self.implementation.startswith("flash_attention") and not _takes_flash(model):
            return f"since {_class_name(model)} does not support {self.implementation}"
        if any(getattr(part.config, "output_attentions", False) for part in _pretrained_models(model)):
            return f"since its config asks for output_attentions, which {self.implementation} does not give"
        return None

    def _switch_attention(self, model: nn.Module) -> str | None:
        """Switches one model, on a config of its own; the reason if that cannot be done."""
        shared = _collect_configs(model)
        # Several models may have been built from one config, and this one alone is to be changed.
        copies = copy.deepcopy(shared)
        # A part that somebody has chosen another implementation for may keep it.
        before = {_current_attention(part) for part in _pretrained_models(model)}
        _exchange_configs(model, dict(zip(map(id, shared), copies, strict=True)))
        try:
            model.set_attn_implementation(self.implementation)  # type: ignore[operator]
        except (ValueError, ImportError, NotImplementedError) as error:
            _exchange_configs(model, dict(zip(map(id, copies), shared, strict=True)))
            return str(error).split(". ")[0].strip()
        if any(
            _current_attention(part) not in (self.implementation, *before)
            for part in _pretrained_models(model)
        ):
            # transformers may have chosen something else, such as a kernel that it would have to download.
            _exchange_configs(model, dict(zip(map(id, copies), shared, strict=True)))
            return "transformers would run another implementation instead"
        return None


def _holds_transformers(profile: Profile) -> bool:
    return "transformers.modeling_utils.PreTrainedModel" in classes_in(profile) or (
        profile.model_class.startswith("transformers.")
    )


def _operator_names(profile: Profile) -> set[str]:
    segments = () if profile.trace is None else profile.trace.segments
    return {each.name for segment in segments for cost in segment.costs.values() for each in cost.operators}


def _outermost_models(model: nn.Module) -> Iterator[nn.Module]:
    if is_pretrained(model):
        yield model
        return
    for child in model.children():
        yield from _outermost_models(child)


def is_pretrained(module: nn.Module) -> bool:
    """Returns whether a module is a ``PreTrainedModel``, without importing transformers."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def _pretrained_models(model: nn.Module) -> Iterator[Any]:
    return (part for part in model.modules() if is_pretrained(part))


def _one_a_config(model: nn.Module) -> list[Any]:
    parts: dict[int, Any] = {}
    for part in _pretrained_models(model):
        parts.setdefault(id(part.config), part)  # the outermost: a head and its body share one
    return list(parts.values())


def _takes_flash(model: nn.Module) -> bool:
    return all(getattr(part, "_supports_flash_attn", False) for part in _pretrained_models(model))


def _current_attention(model: Any) -> str | None:
    """The attention that a model of transformers runs; ``None`` if it was never decided."""
    name: str | None = model.config._attn_implementation
    return name


def _class_name(model: object) -> str:
    return type(model).__name__


def _collect_configs(model: nn.Module) -> list[Any]:
    configs = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if hasattr(value, "_attn_implementation") and not isinstance(value, nn.Module)
    }
    return list(configs.values())


def _exchange_configs(model: nn.Module, new: dict[int, Any]) -> None:
    """Gives every module that holds a config with one of these identities the new one instead."""
    for module in model.modules():
        for name, value in vars(module).items():
            if id(value) in new:
                vars(module)[name] = new[id(value)]
