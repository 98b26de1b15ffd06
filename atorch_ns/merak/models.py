"""Models before they are divided: checked against the arguments, untied, with adapters."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.capture.structure import copy_structure
from atorch_ns.errors import InputError, MissingPackageError
from atorch_ns.merak.args import MerakArguments
from atorch_ns.text import did_you_mean

_CONFIG_NAMES: Final = {  # in configs of transformers
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "seq_length": ("max_position_embeddings", "n_positions", "n_ctx"),
}


def check_sizes(args: MerakArguments, model: nn.Module) -> None:
    """Compares sizes in the arguments with those of the model's config, if it has them.

    Raises:
        InputError: naming those that differ.
    """
    config = getattr(model, "config", None)
    problems = []
    for name, keys in _CONFIG_NAMES.items():
        value = getattr(args, name)
        entry = next((size for key in keys if isinstance(size := getattr(config, key, None), int)), None)
        fits = value is None or entry is None or (value <= entry if name == "seq_length" else value == entry)
        if not fits:
            problems.append(f"{name}={value}, where the model's config has {entry}")
    if problems:
        raise InputError(f"MerakArguments and {type(model).__name__} differ: {'; '.join(problems)}.")


def prepare_model(args: MerakArguments, model: nn.Module) -> nn.Module:
    """The model for training, checked by :func:`check_sizes`."""
    check_sizes(args, model)
    if args.no_tie_modules:
        untie(model)
    config = args.lora()
    return model if config is None else with_adapter(model, config, args.adapter_name)


def with_adapter(model: nn.Module, config: dict[str, Any], name: str) -> nn.Module:
    """The model with LoRA, which trains only adapters. A model that already has adapters stays unchanged.

    Raises:
        MissingPackageError: without the package peft.
        InputError: if the config is not LoraConfig's.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingPackageError(
            "peft", needed_by="lora_config", install="pip install 'atorch-ns[merak]'", reason=str(error)
        ) from error
    if isinstance(model, peft.PeftModel):
        return model
    names = set(inspect.signature(peft.LoraConfig).parameters)
    options = {key: value for key, value in config.items() if key != "peft_type"}  # written by peft
    if unknown := [key for key in options if key not in names]:
        raise InputError(f"lora_config: LoraConfig has no {unknown[0]!r}.{did_you_mean(unknown[0], names)}")
    try:
        peft_model: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**options), adapter_name=name)
    except (TypeError, ValueError) as error:
        raise InputError(f"lora_config: {error}") from error
    return peft_model


def structure_of_adapted(model: nn.Module) -> nn.Module | None:
    """A copy without memory of a model with adapters, for the paths in peft's files; ``None`` for others."""
    if not hasattr(model, "peft_config"):
        return None
    return copy_structure(model, lambda _, tensor: torch.empty_like(tensor, device="meta"), {})


def untie(model: nn.Module) -> None:
    """Replaces each name of a tied parameter by a separate parameter with the same values."""
    unique: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in unique:
                copy: Any = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                setattr(module, name, copy)
            unique.add(module._parameters[name])  # type: ignore[arg-type]
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False  # else from_pretrained ties them again
