"""TensorPlan: which layers of a model are divided over the tensor axis, and how."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

__all__ = [
    "STYLES",
    "LayerStyle",
    "Layout",
    "TensorPlan",
    "Where",
    "forward_arguments",
    "is_settings",
    "meant",
    "style_named",
    "with_wildcards",
]

STYLES: Mapping[str, str] = {
    "colwise": "output features divided; each rank goes on with its own",
    "rowwise": "input features divided; the partial results are summed",
    "colwise_gather_output": "output features divided and gathered again: a head over the vocabulary",
    "embedding_rowwise": "an embedding whose rows, the vocabulary, are divided",
    "heads": "an nn.MultiheadAttention divided by its heads",
    "replicate": "whole on every rank",
    "sequence": "whole on every rank, on a part of the sequence where sequence=True divides it, else like replicate",
}
"""What each style does; the names are those of transformers' plans where it has them."""

_ALIASES = {
    "column": "colwise",
    "col": "colwise",
    "packed_colwise": "colwise",
    "row": "rowwise",
    "colwise_rep": "colwise_gather_output",
    "vocab": "embedding_rowwise",
    "replicated": "replicate",
    "sequence_parallel": "sequence",
}

_UNDIVIDED = ("replicate", "sequence")

Where = Literal["user", "model", "found"]


def style_named(name: str) -> str:
    """The style of that name or of one of its other names.

    Raises:
        ValueError: if there is none.
    """
    style = _ALIASES.get(name, name)
    if style not in STYLES:
        raise ValueError(f"{name!r} is no style of a layer; choose from {', '.join(STYLES)}")
    return style


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model's layers are divided. Holds for every degree that divides its sizes.

    Patterns are dotted paths, which may hold ``*`` (``"model.layers.*.mlp.up_proj"``), or the ends of paths
    (``"attn.c_proj"``).

    Attributes:
        styles: a style of :data:`STYLES` by pattern. Layers that no pattern names stay whole.
        attributes: patterns of attributes, numbers that are divided by the degree (``"h.*.attn.num_heads"``).
        parts: for layers of several fused matrices, the sizes of their outputs by pattern.
        narrow_inputs: patterns of arguments of modules' forward (``"h.*.attn.x"``) whose width code takes for that of
            its results: it sees the share of one rank.
        where: who made it.
        left: what stays whole although it could be large, by path or pattern (``"blocks.*.attn.{q,k,v,o}"``), with the
            reason.
    """

    styles: Mapping[str, str]
    attributes: tuple[str, ...] = ()
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    narrow_inputs: tuple[str, ...] = ()
    where: Where = "user"
    left: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        styles = {pattern: style_named(style) for pattern, style in self.styles.items()}
        object.__setattr__(self, "styles", styles)

    def resolve(self, model: nn.Module) -> Layout:
        """What the plan means for ``model``; where several patterns match a layer, the last one holds."""
        modules = {path: module for path, module in model.named_modules() if path}
        layers: dict[str, LayerStyle] = {}
        for pattern, style in self.styles.items():
            for path in meant(pattern, modules):
                layers[path] = LayerStyle(style)
        for pattern, sizes in self.parts.items():
            for path in set(meant(pattern, modules)) & layers.keys():
                layers[path] = LayerStyle(layers[path].style, tuple(sizes))
        divided = {path: layer for path, layer in layers.items() if layer.style not in _UNDIVIDED}
        order = {path: place for place, path in enumerate(modules)}
        numbers = _integers(model) if self.attributes else []
        arguments = _arguments(model) if self.narrow_inputs else []
        return Layout(
            dict(sorted(divided.items(), key=lambda item: order[item[0]])),
            _all_meant(self.attributes, numbers),
            _all_meant(self.narrow_inputs, arguments),
        )

    def unmatched(self, model: nn.Module) -> list[str]:
        """The patterns that match nothing in ``model``."""
        paths = [path for path, _ in model.named_modules() if path]
        numbers = _integers(model) if self.attributes else []
        arguments = _arguments(model) if self.narrow_inputs else []
        return [
            *(pattern for pattern in dict.fromkeys((*self.styles, *self.parts)) if not meant(pattern, paths)),
            *(pattern for pattern in self.attributes if not meant(pattern, numbers)),
            *(pattern for pattern in self.narrow_inputs if not meant(pattern, arguments)),
        ]

    def as_config(self) -> dict[str, Any]:
        """The plan as keys of ``tensor_parallel``'s config: JSON values."""
        config: dict[str, Any] = {"plan": dict(self.styles)}
        if self.attributes:
            config["attributes"] = list(self.attributes)
        if self.parts:
            config["parts"] = {pattern: list(sizes) for pattern, sizes in self.parts.items()}
        if self.narrow_inputs:
            config["narrow_inputs"] = list(self.narrow_inputs)
        return config

    def describe(self) -> str:
        """The plan in a line for a report."""
        by_style: dict[str, list[str]] = {}
        for pattern, style in self.styles.items():
            by_style.setdefault(style, []).append(pattern)
        text = "; ".join(f"{style}: {', '.join(patterns)}" for style, patterns in by_style.items())
        if self.attributes:
            text += f"; attributes divided: {', '.join(self.attributes)}"
        if self.narrow_inputs:
            text += f"; inputs as wide as one rank's results: {', '.join(self.narrow_inputs)}"
        return text


@dataclass(frozen=True)
class LayerStyle:
    """How one layer is divided.

    Attributes:
        style: of :data:`STYLES`.
        parts: sizes of the outputs of its fused matrices; ``None`` for one matrix.
    """

    style: str
    parts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """A plan worked out for one model.

    Attributes:
        layers: by path.
        attributes: paths of the numbers that are divided.
        narrow_inputs: paths of the arguments of which code sees the share of one rank.
    """

    layers: Mapping[str, LayerStyle]
    attributes: tuple[str, ...] = ()
    narrow_inputs: tuple[str, ...] = ()

    def within(self, prefix: str) -> Layout:
        """The layout as the module at the path ``prefix`` sees it."""
        head = f"{prefix}." if prefix else ""
        layers = {
            path.removeprefix(head): layer for path, layer in self.layers.items() if path.startswith(head)
        }
        return Layout(layers, _inside(self.attributes, head), _inside(self.narrow_inputs, head))

    def joined(self, other: Layout) -> Layout:
        """Both."""
        names = tuple(dict.fromkeys((*self.attributes, *other.attributes)))
        inputs = tuple(dict.fromkeys((*self.narrow_inputs, *other.narrow_inputs)))
        return Layout({**self.layers, **other.layers}, names, inputs)

    def placed(self, parent: str) -> Layout:
        """The layout of the module at the path ``parent``, as the model sees it."""
        head = f"{parent}." if parent else ""
        return Layout(
            {f"{head}{path}": layer for path, layer in self.layers.items()},
            tuple(f"{head}{path}" for path in self.attributes),
            tuple(f"{head}{path}" for path in self.narrow_inputs),
        )


def meant(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that ``pattern`` matches; if none does as a whole, those that end with it."""
    known = list(paths)
    return fnmatch.filter(known, pattern) or fnmatch.filter(known, f"*.{pattern}")


def _all_meant(patterns: Iterable[str], paths: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found for pattern in patterns for found in meant(pattern, paths)))


def _inside(paths: Iterable[str], head: str) -> tuple[str, ...]:
    return tuple(path.removeprefix(head) for path in paths if path.startswith(head))


def forward_arguments(module: nn.Module) -> list[str]:
    """The names of the arguments of its forward, but for ``*args`` and ``**kwargs``."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a forward that is no Python function
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in several]


def _arguments(model: nn.Module) -> list[str]:
    """The paths of the arguments of all modules' forward."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in forward_arguments(module)
    ]


def _integers(model: nn.Module) -> list[str]:
    """The paths of the numbers that modules, and objects of settings that they hold, have."""
    found = []
    for path, module in model.named_modules():
        head = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            if type(value) is int:
                found.append(f"{head}{name}")
            elif is_settings(value):
                found += [f"{head}{name}.{n}" for n, number in vars(value).items() if type(number) is int]
    return found


def is_settings(value: Any) -> bool:
    """Whether a module's attribute is an object that holds the model's settings."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)


def with_wildcards(paths: Iterable[str], all_paths: Iterable[str]) -> list[str]:
    """``paths`` with ``*`` for numbers, where that means none of ``all_paths`` but those."""
    left, candidates = list(paths), list(all_paths)
    wanted, result = set(left), []
    while left:
        pattern = next(
            (p for p in _starred(left[0]) if set(fnmatch.filter(candidates, p)) <= wanted), left[0]
        )
        meant = set(fnmatch.filter(left, pattern))
        result.append(pattern if len(meant) > 1 else left[0])
        left = [path for path in left if path not in meant]
    return result


def _starred(path: str) -> list[str]:
    """The path with ``*`` for all its numbers, and for each one."""
    parts = path.split(".")
    places = [place for place, part in enumerate(parts) if part.isdigit()]
    stars = [places, *([place] for place in places)]
    return [".".join("*" if place in those else part for place, part in enumerate(parts)) for those in stars]
