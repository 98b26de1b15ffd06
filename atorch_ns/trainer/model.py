"""The plain model of a Trainer: made by its configuration, with weights and precision."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.text import error_text, with_article
from atorch_ns.trainer.args import Precision, TrainerArgs
from atorch_ns.trainer.components import make

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes of a configuration's precisions."""


def dtype_of(precision: Precision, kind: Literal["param", "buffer", "input"]) -> torch.dtype | None:
    """The dtype that a configuration casts parameters, buffers or inputs to; ``None`` to leave them."""
    name = precision.get(kind) if isinstance(precision, dict) else precision
    return DTYPES.get(name or "none")


def make_model(args: TrainerArgs) -> nn.Module:
    """The plain model, with its weights and precision.

    Raises:
        InputError: if it cannot be made.
    """
    model = make(args.model.type, options=args.model.args, what="model")
    if not isinstance(model, nn.Module):
        raise InputError(f"model.type must make a torch.nn.Module; it made {with_article(model)}.")
    if args.tracing_from_weights is not None:
        load_weights(model, args.tracing_from_weights)
    cast(model, dtype_of(args.precision, "param"), dtype_of(args.precision, "buffer"))
    return model


def takes_by_name(model: nn.Module, sample: Any) -> bool:
    """Returns whether ``forward`` takes the items of a sample by name, as Hugging Face models do."""
    if not isinstance(sample, Mapping) or len(sample) < 2:
        return False
    return sample.keys() <= inspect.signature(model.forward).parameters.keys()


def load_weights(model: nn.Module, path: str, prefix: str = "") -> None:
    """Loads weights into a model from a ``torch.save`` file, which may hold them under ``model``."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        state = contents.get("model", contents)
        model.load_state_dict(
            {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        )
    except Exception as error:
        raise InputError(f"tracing_from_weights: cannot load {path}: {error_text(error)}") from error


@torch.no_grad()
def cast(model: nn.Module, parameters: torch.dtype | None, buffers: torch.dtype | None) -> None:
    """Casts floating parameters and buffers, each where a dtype is given."""
    for dtype, tensors in ((parameters, model.parameters()), (buffers, model.buffers())):
        for tensor in tensors:
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)  # the same Parameter, so that ties stay
