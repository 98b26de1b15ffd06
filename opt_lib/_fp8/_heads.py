"""Which linear layers make the logits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["HEAD_NAMES", "Heads"]

HEAD_NAMES = ("lm_head", "output_embedding", "embed_out", "output_projection")
"""Last parts of the names that only layers which make logits have, wherever they stand."""

LIKELY_HEAD_NAMES = frozenset(
    (
        "head",
        "output",
        "logits",
        "classifier",
        "unembed",
        "proj_out",
        "decoder",
        "fc_out",
        "score",
        "to_logits",
    )
)
"""Last parts of names that layers which make logits have, and others, too: they count for a child of the model, or where
there is one output for each row of the largest embedding."""


class Heads:
    """Which linears make the logits: by what the model says of itself, by their weights, by their names."""

    def __init__(self, model: nn.Module) -> None:
        self._tied = _weights_of_others(model)
        self._said = {id(module) for module in _output_embeddings(model)}
        rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        self._rows = max(rows, default=None)

    def has(self, name: str, module: nn.Linear) -> bool:
        """Whether the linear of this name is one."""
        if id(module.weight) in self._tied or id(module) in self._said:
            return True
        parent, _, last = name.rpartition(".")
        if last in HEAD_NAMES:
            return True
        return last in LIKELY_HEAD_NAMES and (not parent or module.out_features == self._rows)


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """What ``get_output_embeddings()`` of transformers answers, of the model and of models in it."""
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            found = ask()
        except Exception:  # some models have none to answer with, and raise what they like
            continue
        if isinstance(found, nn.Module):
            yield found


def _weights_of_others(model: nn.Module) -> set[int]:
    """The parameters that modules other than linears hold: an embedding's, which the logits' layer may share."""
    return {id(parameter) for module in _others(model) for parameter in module.parameters(recurse=False)}


def _others(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if not isinstance(module, nn.Linear))
