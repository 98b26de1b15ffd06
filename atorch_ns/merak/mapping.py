"""Lists of layers that tensor parallelism divides, by class of model, as Merak has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.text import with_article

Ratio = tuple[float, float, str]
"""Ratio of a linear layer's inputs to outputs, and ``"col"`` or ``"row"``."""


@dataclass(frozen=True, kw_only=True)
class TpLayerLists:
    """Layers and attributes that tensor parallelism divides in a class of models.

    Attributes:
        col_para_list, row_para_list: names of linear layers whose outputs, or inputs, are divided.
        input_output_mapping: styles of linear layers by the ratio of their inputs to their outputs.
        weight_change_list: names of layers, each with the dimension of its weight that is divided.
        tp_attr_list: names of attributes that are divided by the degree.
    """

    col_para_list: tuple[str, ...] = ()
    row_para_list: tuple[str, ...] = ()
    input_output_mapping: tuple[Ratio, ...] = ()
    weight_change_list: tuple[tuple[str, int], ...] = ()
    tp_attr_list: tuple[str, ...] = ()

    def as_config(self) -> dict[str, Any]:
        """The lists as the config of ``tensor_parallel``, which has fields of these names."""
        return {name: list(value) for name, value in vars(self).items() if value}


MP_MODEL_MAPPING: Final[dict[str, TpLayerLists]] = {
    "gpt2": TpLayerLists(
        input_output_mapping=((1, 3, "col"), (1, 1, "row"), (1, 4, "col"), (4, 1, "row")),
        tp_attr_list=("num_heads", "embed_dim", "split_size"),
    ),
    # Attention adds a bias of positions for all heads, whose embedding is not divided by columns.
    "t5": TpLayerLists(col_para_list=("DenseReluDense.wi",), row_para_list=("DenseReluDense.wo",)),
    "bert": TpLayerLists(
        col_para_list=("query", "key", "value", "intermediate.dense"),
        row_para_list=("output.dense",),
        tp_attr_list=("num_attention_heads", "all_head_size"),
    ),
    "vit": TpLayerLists(col_para_list=("q_proj", "k_proj", "v_proj", "fc1"), row_para_list=("o_proj", "fc2")),
}
"""Merak's lists with today's names of transformers, by ``config.model_type``: examples for a user's lists.
Models of these types need none, since ``tensor_parallel`` finds and tests the layers to divide."""

_LISTS: Final[dict[str, TpLayerLists]] = {}  # by name of class; "" for all models


def set_tp_layer_lists(
    col_para_list: Sequence[str] | None = None,
    row_para_list: Sequence[str] | None = None,
    input_output_mapping: Iterable[Sequence[Any]] | None = None,
    weight_change_list: Iterable[Sequence[Any]] | None = None,
    tp_attr_list: Sequence[str] | None = None,
    *,
    model_class: type[nn.Module] | str | None = None,
) -> None:
    """Sets the layers that tensor parallelism divides, for models that :class:`MerakTrainer` gets later.

    Args:
        col_para_list, row_para_list: ends of names of linear layers with divided outputs, or inputs.
        input_output_mapping: ``(input, output, "row" or "col")``: styles by the ratio of inputs to outputs.
        weight_change_list: ``(name, dimension)``: layers, or their ``weight``, divided along a dimension.
        tp_attr_list: attributes of modules that are divided by the degree.
        model_class: class of the models, or its name; ``None`` for all that have no lists of their own.

    Without any list, the lists of ``model_class`` are removed. Lists are tested on the model before use.

    Raises:
        InputError: if an argument is not a list.
    """
    name = model_class if isinstance(model_class, str) else getattr(model_class, "__name__", "")
    arguments = {
        "col_para_list": col_para_list,
        "row_para_list": row_para_list,
        "input_output_mapping": input_output_mapping,
        "weight_change_list": weight_change_list,
        "tp_attr_list": tp_attr_list,
    }
    for key, value in arguments.items():
        if isinstance(value, str) or not (value is None or isinstance(value, Iterable)):
            raise InputError(f"set_tp_layer_lists: {key} must be a list; it is {with_article(value)}.")
    if not any(arguments.values()):
        _LISTS.pop(name, None)
        return
    pairs = ("input_output_mapping", "weight_change_list")  # whose items are tuples
    read: dict[str, Any] = {
        key: tuple(tuple(item) if key in pairs else item for item in value or ())
        for key, value in arguments.items()
    }
    _LISTS[name] = TpLayerLists(**read)


def lists_for(model: nn.Module) -> TpLayerLists | None:
    """The lists for a model's class or its nearest base class, otherwise those for all models."""
    names = [base.__name__ for base in type(model).__mro__]  # the nearest class counts
    return next((_LISTS[name] for name in (*names, "") if name in _LISTS), None)
