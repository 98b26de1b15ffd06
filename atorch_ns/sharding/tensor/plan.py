"""Tensor-parallel plans: kinds of layers, styles by pattern, and the layout that they give one model.

Legend: I input features, O output features, V vocabulary, D model width.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.system import table_rows

Compute = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``(module, input, weight, bias) -> output``."""


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer that can be divided.

    Attributes:
        name: shown in messages.
        out_dim: the dimension of the weight that outputs lie along; of an embedding, the vocabulary.
        in_dim: the other dimension.
        compute: the layer's computation on a given weight and bias.
        counts: names of the attributes that hold its numbers of outputs and inputs.
    """

    name: str
    out_dim: int
    in_dim: int
    compute: Compute
    counts: tuple[str, str]

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """(outputs, inputs) of the whole layer."""
        weight = module._parameters["weight"]
        assert weight is not None
        return weight.shape[self.out_dim], weight.shape[self.in_dim]


def _compute_linear(_: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _compute_conv1d(_: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.reshape(-1, x.size(-1))  # as transformers computes it: its weight is [I, O]
    out = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return out.view(*x.shape[:-1], weight.size(1))


def _embed_ids(module: Any, ids: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return F.embedding(ids, weight, module.padding_idx)


def _as_written(
    module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # The code of the module's own class, on the values given (a linear layer in fp8, a scaled embedding).
    with own_values(module, weight, bias):
        out: torch.Tensor = type(module).whole_forward(module, x)
    return out


def _by_product(
    module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out: torch.Tensor = module.product(x, weight)
    return out if bias is None else out + bias.to(out.dtype)


@contextmanager
def own_values(module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[None]:
    """Shows the module's own code these tensors in place of its parameters."""
    params: dict[str, Any] = module._parameters
    before = dict(params)
    params["weight"] = weight
    if "bias" in params:
        params["bias"] = bias
    try:
        yield
    finally:
        params.update(before)


LINEAR = LayerKind("linear", 0, 1, _compute_linear, ("out_features", "in_features"))
CONV1D = LayerKind("Conv1D", 1, 0, _compute_conv1d, ("nf", "nx"))  # of transformers, for GPT-2
EMBEDDING = LayerKind("embedding", 0, 1, _embed_ids, ("", ""))  # no attribute is divided
ROUNDING = LayerKind("linear", 0, 1, _by_product, ("out_features", "in_features"))
"""The kind of a :class:`~atorch_ns.sharding.tensor.layers.RoundingLinear`."""
# Classes with a forward of their own, which runs on a part of the weight.
_LINEAR_AS_WRITTEN = LayerKind("linear", 0, 1, _as_written, ("out_features", "in_features"))
_EMBEDDING_AS_WRITTEN = LayerKind("embedding", 0, 1, _as_written, ("", ""))


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a layer; ``None`` for a module that cannot be divided."""
    cls = type(module)
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    if isinstance(module, nn.Linear):
        if cls.forward is nn.Linear.forward:
            return LINEAR
        return ROUNDING if hasattr(cls, "product") else _LINEAR_AS_WRITTEN
    if isinstance(module, nn.Embedding):
        # Ids of other ranks look up row 0 of a part: max_norm would rescale it, frequencies would count it.
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return None
        if len(list(module.parameters())) > 1:  # which would see the rows of one rank alone
            return None
        return EMBEDDING if cls.forward is nn.Embedding.forward else _EMBEDDING_AS_WRITTEN
    # By name and shape: transformers need not be installed.
    if cls.__name__ == "Conv1D" and weight.shape == (getattr(module, "nx", 0), getattr(module, "nf", 0)):
        return CONV1D
    return None


def layer_sizes(module: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a layer that has a kind."""
    kind = kind_of(module)
    assert kind is not None
    return kind.sizes(module)


def divided_dims(style: str, kind: LayerKind) -> dict[str, int]:
    """The dimension along which each parameter of a layer is divided; those not named stay whole."""
    if style == "rowwise":
        return {"weight": kind.in_dim}
    return {"weight": kind.out_dim, "bias": 0}


_ROWS = table_rows(Path(__file__).with_name("styles.csv"))
STYLES: Mapping[str, str] = {row["style"]: row["effect"] for row in _ROWS}
"""The effect of each style; the names are those of transformers' plans where it has them."""

_ALIASES = {alias: row["style"] for row in _ROWS for alias in row["aliases"].split()}

_UNDIVIDED = ("replicate", "sequence")  # styles that leave a layer whole

Where = Literal["user", "model", "found"]


def style_named(name: str) -> str:
    """The style with that name or alias.

    Raises:
        ValueError: if there is none.
    """
    style = _ALIASES.get(name, name)
    if style not in STYLES:
        raise ValueError(f"{name!r} is not a style of a layer; choose from {', '.join(STYLES)}")
    return style


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The division of a model's layers, for every degree that divides their sizes.

    Patterns are dotted paths, which may hold ``*`` (``"model.layers.*.mlp.up_proj"``), or the ends of paths
    (``"attn.c_proj"``).

    Attributes:
        styles: a style of :data:`STYLES` by pattern. Layers that no pattern names stay whole.
        attributes: patterns of attributes, numbers that are divided by the degree (``"h.*.attn.num_heads"``).
        parts: output sizes of the matrices fused in a layer, by pattern.
        narrow_inputs: patterns of arguments of ``forward`` (``"h.*.attn.x"``) that code sees with the width
            of one rank, since it takes their width for that of its results.
        where: the source of the plan.
        left: reasons why layers stay whole, by path or pattern (``"blocks.*.attn.{q,k,v,o}"``).
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
        """The layout for ``model``; where several patterns match a layer, the last one holds."""
        modules = {path: module for path, module in model.named_modules() if path}
        layers: dict[str, LayerStyle] = {}
        for pattern, style in self.styles.items():
            for path in matching(pattern, modules):
                layers[path] = LayerStyle(style)  # the last pattern holds
        for pattern, sizes in self.parts.items():
            for path in set(matching(pattern, modules)) & layers.keys():
                layers[path] = LayerStyle(layers[path].style, tuple(sizes))
        split_layers = {path: layer for path, layer in layers.items() if layer.style not in _UNDIVIDED}
        order = {path: index for index, path in enumerate(modules)}  # that of the model
        return Layout(
            dict(sorted(split_layers.items(), key=lambda item: order[item[0]])),
            _all_matching(self.attributes, integer_paths(model) if self.attributes else []),
            _all_matching(self.narrow_inputs, argument_paths(model) if self.narrow_inputs else []),
        )

    def unmatched(self, model: nn.Module) -> list[str]:
        """The patterns that match nothing in ``model``."""
        paths = [path for path, _ in model.named_modules() if path]
        groups = (
            (dict.fromkeys((*self.styles, *self.parts)), paths),
            (self.attributes, integer_paths(model)),
            (self.narrow_inputs, argument_paths(model)),
        )
        return [pattern for patterns, names in groups for pattern in patterns if not matching(pattern, names)]

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
        """The plan as one line of a report."""
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
    """The division of one layer.

    Attributes:
        style: a key of :data:`STYLES`.
        parts: output sizes of its fused matrices; ``None`` for one matrix.
    """

    style: str
    parts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """A plan resolved for one model.

    Attributes:
        layers: the divided layers, by path.
        attributes: paths of the numbers that are divided.
        narrow_inputs: paths of arguments of forward that code sees with the width of one rank.
    """

    layers: Mapping[str, LayerStyle]
    attributes: tuple[str, ...] = ()
    narrow_inputs: tuple[str, ...] = ()

    def filtered(self, keep: Callable[[str], bool]) -> Layout:
        """The layout of the paths for which ``keep`` is true."""
        layers = {path: layer for path, layer in self.layers.items() if keep(path)}
        return Layout(layers, tuple(filter(keep, self.attributes)), tuple(filter(keep, self.narrow_inputs)))

    def joined(self, other: Layout) -> Layout:
        """The layout with the layers, attributes and inputs of both."""
        names = tuple(dict.fromkeys((*self.attributes, *other.attributes)))
        inputs = tuple(dict.fromkeys((*self.narrow_inputs, *other.narrow_inputs)))
        return Layout({**self.layers, **other.layers}, names, inputs)

    def within(self, prefix: str) -> Layout:
        """The layout as the module at the path ``prefix`` sees it."""
        return self.filtered(lambda path: is_inside(path, prefix))._rename_paths(
            lambda path: relative(path, prefix)
        )

    def placed(self, parent: str) -> Layout:
        """The inverse of :meth:`within`: the layout for the model that holds this one at ``parent``."""
        return self._rename_paths(lambda path: f"{parent}.{path}" if parent else path)

    def _rename_paths(self, name: Callable[[str], str]) -> Layout:
        layers = {name(path): layer for path, layer in self.layers.items()}
        return Layout(layers, tuple(map(name, self.attributes)), tuple(map(name, self.narrow_inputs)))


@dataclass(frozen=True)
class RegionSpec:
    """A region: layers between which ranks hold different features.

    Attributes:
        columns: paths of the column-parallel layers that begin it.
        rows: paths of the row-parallel layers that end it.
        random: whether random numbers are drawn inside.
        one_input: whether all columns take the unchanged input stream of the module around them.
        one_use: whether nothing else in that module reads the stream.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    random: bool = True
    one_input: bool = False
    one_use: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of all its layers."""
        return (*self.columns, *self.rows)

    def crosses(self, path: str) -> bool:
        """Returns whether some of its layers lie in the module at ``path``, and some outside."""
        return len({is_inside(layer, path) for layer in self.layers}) > 1

    def within(self, prefix: str) -> RegionSpec:
        """The region as the module at the path ``prefix`` sees it."""
        return replace(
            self,
            columns=tuple(relative(path, prefix) for path in self.columns),
            rows=tuple(relative(path, prefix) for path in self.rows),
        )


@dataclass(frozen=True)
class Packing:
    """The order of the elements of a fused parameter when each rank has a share of every part.

    A fused ``qkv`` of a user's model is ``[q | k | v]``. Divided over two ranks, the first must hold
    ``[q0 | k0 | v0]``: the parameter is put in the order ``[q0 k0 v0 | q1 k1 v1]`` and then divided evenly.

    Attributes:
        dim: the dimension along which the parts lie.
        sizes: sizes of the parts, in the user's order.
        ranks: the number of ranks that each part is divided over.
    """

    dim: int
    sizes: tuple[int, ...]
    ranks: int

    def order(self, device: torch.device) -> torch.Tensor:
        """The user's index at each place, int64, as long as the dimension."""
        starts = [sum(self.sizes[:part]) for part in range(len(self.sizes))]
        # Rank by rank, and for each rank its share of every part.
        pieces = [
            torch.arange(
                start + rank * size // self.ranks, start + (rank + 1) * size // self.ranks, device=device
            )
            for rank in range(self.ranks)
            for start, size in zip(starts, self.sizes, strict=True)
        ]
        return torch.cat(pieces)

    def pack(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor, given in the user's order, in this order."""
        return whole.index_select(self.dim, self.order(whole.device))

    def unpack(self, whole: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`pack`."""
        return whole.index_select(self.dim, torch.argsort(self.order(whole.device)))  # inverse permutation


# Styles of modules that stay whole; the self-test finds which of their gradients are summed over ranks.
_WHOLE = {"replicated_with_grad_allreduce", "replicate", "all_reduce"}


def model_plan(model: nn.Module) -> TensorPlan | None:
    """The plan that a model brings along, as those of transformers do; ``None`` for none or unknown styles.

    Entries of parameters and of experts are left out: experts stay whole along the tensor axis.
    """
    entries = getattr(model, "tp_plan", None)
    if not isinstance(entries, Mapping) or not entries:
        return None
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    parts: dict[str, tuple[int, ...]] = {}
    for pattern, style in entries.items():
        layers = [modules[path] for path in matching(pattern, modules) if kind_of(modules[path]) is not None]
        if style in _WHOLE or not layers:
            continue
        try:
            styles[pattern] = style_named(style)
        except ValueError:
            return None
        if style == "packed_colwise":  # the gate and the up projection, of equal sizes
            half = layer_sizes(layers[0])[0] // 2
            parts[pattern] = (half, half)
    return TensorPlan(styles=styles, parts=parts, where="model") if styles else None


def common_parent(paths: Sequence[str]) -> str:
    """The path of the innermost module that holds all ``paths``."""
    parents = [path.split(".")[:-1] for path in paths]
    shared = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def relative(path: str, parent: str) -> str:
    """``path`` as ``parent`` sees it."""
    return path.removeprefix(f"{parent}.") if parent else path


def is_inside(path: str, parent: str) -> bool:
    """Returns whether ``path`` lies in the module at the path ``parent``; the empty path is the model's."""
    return not parent or path.startswith(f"{parent}.")


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that ``pattern`` matches; if none does as a whole, those that end with it."""
    names = list(paths)
    return fnmatch.filter(names, pattern) or fnmatch.filter(names, f"*.{pattern}")


def _all_matching(patterns: Iterable[str], paths: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for pattern in patterns for path in matching(pattern, paths)))


def forward_arguments(module: nn.Module) -> list[str]:
    """The names of the arguments of the module's forward, without ``*args`` and ``**kwargs``."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a forward that is not a Python function
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in several]


def argument_paths(model: nn.Module) -> list[str]:
    """The paths of the arguments of all modules' forward."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in forward_arguments(module)
    ]


def integers(module: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Yields path and value of each integer of a module or its settings, and whether it is a setting."""
    for name, value in vars(module).items():
        if type(value) is int:  # not bool
            yield name, value, False
        elif is_settings(value):
            yield from (
                (f"{name}.{key}", number, True) for key, number in vars(value).items() if type(number) is int
            )


def integer_paths(model: nn.Module) -> list[str]:
    """The paths of integer attributes of all modules, private ones left out."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, _, _ in integers(module)
        if not name.startswith("_")
    ]


def is_settings(value: Any) -> bool:
    """Returns whether a module's attribute is an object that holds the model's settings."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)


def with_wildcards(paths: Iterable[str], all_paths: Iterable[str]) -> list[str]:
    """``paths`` with ``*`` in place of numbers, where the pattern matches no other of ``all_paths``."""
    rest, candidates = list(paths), list(all_paths)
    targets, result = set(rest), []
    while rest:
        # It may match no path but the given ones, or others would be divided too.
        pattern = next(
            (p for p in _star_patterns(rest[0]) if set(fnmatch.filter(candidates, p)) <= targets), rest[0]
        )
        matches = set(fnmatch.filter(rest, pattern))
        result.append(pattern if len(matches) > 1 else rest[0])
        rest = [path for path in rest if path not in matches]
    return result


def _star_patterns(path: str) -> list[str]:
    parts = path.split(".")
    places = [index for index, part in enumerate(parts) if part.isdigit()]
    stars = [places, *([index] for index in places)]  # all numbers, then each one alone
    return [".".join("*" if index in those else part for index, part in enumerate(parts)) for those in stars]
