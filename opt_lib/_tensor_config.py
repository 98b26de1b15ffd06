"""The settings of tensor_parallel, and those that users of Merak know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.method import Flag, MethodConfig
from atorch_ns.sharding import TensorPlan, kind_of, style_named

__all__ = ["TensorParallelConfig", "users_plan"]

_MERAK_STYLES = {"col": "colwise", "row": "rowwise"}


class TensorParallelConfig(MethodConfig):
    """Which layers are divided, and how. With no plan, the model's own is used, or one is found."""

    plan: dict[str, str] | None = Field(
        default=None,
        description="Style by module: colwise, rowwise, colwise_gather_output, embedding_rowwise, replicate or "
        "sequence by dotted path, which may hold *, or by the end of paths. Layers that are not named stay whole.",
    )
    attributes: tuple[str, ...] = Field(
        default=(),
        description="Paths of numbers that code divides by, as h.*.attn.num_heads; made smaller too.",
    )
    parts: dict[str, tuple[int, ...]] = Field(
        default_factory=dict, description="Sizes of the outputs of fused layers, by path, as [768, 768, 768]."
    )
    narrow_inputs: tuple[str, ...] = Field(
        default=(),
        description="Arguments of modules' forward, as h.*.attn.x, whose width code takes for that of its results: "
        "the code sees the share of one rank, its layers the whole.",
    )
    source: Literal["auto", "model", "found"] = Field(
        default="auto",
        description="Where a plan comes from if none is given: the model's own (as models of transformers have) "
        "or a found one; auto tries them in this order.",
    )
    sequence: Flag = Field(
        default=False,
        description="Divide the sequence between divided layers: activations there take a part of the memory.",
    )
    sequence_dim: int = Field(default=1, ge=0, description="The dimension of the sequence in hidden states.")
    self_test: Flag = Field(
        default=True,
        description="Compare each distinct block, divided and whole, on a small input before use. Without it a plan "
        "that reshapes heads wrongly trains wrongly and says nothing.",
    )
    parallel_loss: Flag | Literal["auto"] = Field(
        default="auto",
        description="Leave logits divided over the vocabulary and compute cross-entropy on the parts, in train_step. "
        "auto: where a test of the loss on a small batch gives the same loss and gradients, and nothing else needs "
        "the logits whole.",
    )
    undivided: Literal["error", "keep"] = Field(
        default="error",
        description="What becomes of attention whose heads, or heads of keys and values, the degree does not divide: "
        "an error that names degrees that would work, or it is kept whole on every rank.",
    )
    col_para_list: tuple[str, ...] = Field(default=(), description="As in Merak: layers that are colwise.")
    row_para_list: tuple[str, ...] = Field(default=(), description="As in Merak: layers that are rowwise.")
    tp_attr_list: tuple[str, ...] = Field(default=(), description="As in Merak: attributes.")
    weight_change_list: tuple[tuple[str, int], ...] = Field(
        default=(), description="As in Merak: (layer, dimension of its weight that is divided)."
    )
    input_output_mapping: tuple[tuple[float, float, str], ...] = Field(
        default=(),
        description="As in Merak: (input, output, 'row' or 'col'): the style of layers by their ratio.",
    )

    @field_validator("plan")
    @classmethod
    def _known_styles(cls, plan: dict[str, str] | None) -> dict[str, str] | None:
        return None if plan is None else {pattern: style_named(style) for pattern, style in plan.items()}

    @field_validator("input_output_mapping")
    @classmethod
    def _known_ratios(
        cls, ratios: tuple[tuple[float, float, str], ...]
    ) -> tuple[tuple[float, float, str], ...]:
        for inputs, outputs, style in ratios:
            if style not in _MERAK_STYLES or inputs <= 0 or outputs <= 0:
                raise ValueError(f"({inputs}, {outputs}, {style!r}): write two sizes and 'row' or 'col'")
        return ratios


def users_plan(config: TensorParallelConfig, model: nn.Module) -> TensorPlan | None:
    """The plan that a config spells out; ``None`` if it leaves the plan open.

    Raises:
        InputError: if attributes or parts are given without any layer, or a dimension does not exist.
    """
    styles = {**_by_ratio(config, model), **_by_weight(config, model)}
    styles |= dict.fromkeys(config.col_para_list, "colwise")
    styles |= dict.fromkeys(config.row_para_list, "rowwise")
    styles |= config.plan or {}
    attributes = (*config.attributes, *config.tp_attr_list)
    if not styles:
        if attributes or config.parts or config.narrow_inputs:
            raise InputError(
                "attributes, parts and narrow_inputs of tensor_parallel belong to a plan; give plan (or col_para_list and "
                "row_para_list) as well, or leave them out to have a plan found."
            )
        return None
    return TensorPlan(
        styles=styles,
        attributes=attributes,
        parts=config.parts,
        narrow_inputs=config.narrow_inputs,
        where="user",
    )


def _by_ratio(config: TensorParallelConfig, model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        kind = kind_of(module)
        if kind is None or isinstance(module, nn.Embedding):
            continue
        own_outputs, own_inputs = kind.sizes(module)
        for inputs, outputs, style in config.input_output_mapping:
            if own_inputs * outputs == own_outputs * inputs:
                found[path] = _MERAK_STYLES[style]
    return found


def _by_weight(config: TensorParallelConfig, model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    modules: Mapping[str, Any] = dict(model.named_modules())
    for name, dim in config.weight_change_list:
        layer = name.removesuffix(".weight")
        if not -2 <= dim <= 1:
            raise InputError(
                f"weight_change_list of tensor_parallel names dimension {dim} of {name}, and weights of layers have "
                "two: use 0 or 1."
            )
        for path, module in modules.items():
            kind = kind_of(module)
            if kind is not None and (path == layer or path.endswith(f".{layer}")):
                embedding = isinstance(module, nn.Embedding)
                column = "embedding_rowwise" if embedding else "colwise"
                found[path] = column if dim % 2 == kind.out_dim else "rowwise"
    return found
