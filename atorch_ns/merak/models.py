"""Models before they are divided: checked against the arguments, untied, with adapters."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.merak.args import MerakArguments

_CONFIG_NAMES: Final = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "seq_length": ("max_position_embeddings", "n_positions", "n_ctx"),
}


def check_sizes(args: MerakArguments, model: nn.Module) -> None:
    """Compares sizes that arguments name with those of the model's config, where it has them.

    Raises:
        InputError: naming those that differ.
    """
    config = getattr(model, "config", None)
    problems = []
    for name, keys in _CONFIG_NAMES.items():
        given = getattr(args, name)
        known = next((size for key in keys if isinstance(size := getattr(config, key, None), int)), None)
        fits = given is None or known is None or (given <= known if name == "seq_length" else given == known)
        if not fits:
            problems.append(f"{name}={given}, where the model's config has {known}")
    if problems:
        raise InputError(f"MerakArguments and {type(model).__name__} differ: {'; '.join(problems)}.")


def prepared(args: MerakArguments, model: nn.Module) -> nn.Module:
    """The model that is trained."""
    if args.no_tie_modules:
        untie(model)
    return model


def untie(model: nn.Module) -> None:
    """Gives each name of a tied parameter a parameter of its own, with the same values."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in seen:
                own: Any = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                setattr(module, name, own)
            seen.add(module._parameters[name])  # type: ignore[arg-type]
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
