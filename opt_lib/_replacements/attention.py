"""Attention of transformers models: one switch for all their modules, by transformers' own public function."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from opt_lib._replacements._base import ANYWHERE, Outcome, Replacement, Requirements

__all__ = ["AttentionSwitch"]


@dataclass(frozen=True, kw_only=True)
class AttentionSwitch(Replacement):
    """Switches transformers models from eager attention to another implementation.

    Models that run anything but eager attention are left alone: somebody has chosen it. So are models whose
    config asks for the attention weights, which only the eager implementation returns.

    Attributes:
        name: as written in ``include`` and ``exclude``.
        implementation: as ``set_attn_implementation`` names it.
        requirements: what the implementation needs of a job.
    """

    name: str
    implementation: str
    requirements: Requirements = ANYWHERE

    @property
    def looks_for(self) -> str:
        """Models of transformers."""
        return "transformers models"

    def replace(self, model: nn.Module) -> Outcome:
        """Switches every model of transformers in ``model``."""
        outcome = Outcome(model=model)
        for inner in _outermost(model):
            eager = [part for part in _one_a_config(inner) if _implementation(part) == "eager"]
            reason = self._refusal(inner, eager) or self._switch(inner)
            for part in eager:
                if reason is None and _implementation(part) == self.implementation:
                    outcome.replaced[f"eager attention of {_name(part)} → {self.implementation}"] += 1
                else:
                    why = reason or "transformers cannot switch it"
                    outcome.kept[f"{_name(part)}: stays eager, {why}"] += 1
            if not eager:
                outcome.kept[f"{_name(inner)}: runs {_implementation(inner)} attention already"] += 1
        return outcome

    def _refusal(self, model: nn.Module, eager: list[Any]) -> str | None:
        if not eager:
            return "nothing is eager"
        if any(getattr(part.config, "output_attentions", False) for part in _pretrained(model)):
            return f"since its config asks for output_attentions, which {self.implementation} does not give"
        return None

    def _switch(self, model: nn.Module) -> str | None:
        """Switches one model, on a config of its own; the reason if that cannot be done."""
        shared = _configs(model)
        # Several models may have been built from one config, and this one alone is to be changed.
        own = copy.deepcopy(shared)
        _exchange(model, dict(zip(map(id, shared), own, strict=True)))
        try:
            model.set_attn_implementation(self.implementation)  # type: ignore[operator]
        except (ValueError, ImportError, NotImplementedError) as error:
            _exchange(model, dict(zip(map(id, own), shared, strict=True)))
            return str(error).split(". ")[0].strip()
        return None


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The transformers models in ``model`` that lie in no other."""
    if _is_pretrained(model):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _is_pretrained(module: nn.Module) -> bool:
    """Whether it is a ``PreTrainedModel``, without importing transformers."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def _pretrained(model: nn.Module) -> Iterator[Any]:
    """The models of transformers in ``model``, which is one itself."""
    return (part for part in model.modules() if _is_pretrained(part))


def _one_a_config(model: nn.Module) -> list[Any]:
    """The outermost model of each config: a head and its body share one."""
    parts: dict[int, Any] = {}
    for part in _pretrained(model):
        parts.setdefault(id(part.config), part)
    return list(parts.values())


def _implementation(model: Any) -> str | None:
    """The attention that a model of transformers runs; ``None`` if it was never decided."""
    used: str | None = model.config._attn_implementation
    return used


def _name(model: object) -> str:
    return type(model).__name__


def _configs(model: nn.Module) -> list[Any]:
    """The config objects that modules hold, each once."""
    found = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if hasattr(value, "_attn_implementation") and not isinstance(value, nn.Module)
    }
    return list(found.values())


def _exchange(model: nn.Module, new: dict[int, Any]) -> None:
    """Gives every module that holds a config with one of these identities the new one instead."""
    for module in model.modules():
        for name, value in vars(module).items():
            if id(value) in new:
                vars(module)[name] = new[id(value)]
