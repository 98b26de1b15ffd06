"""The loss as transformers' Trainer computes it, of a model that runs elsewhere.

``Trainer.compute_loss(model, inputs)`` calls the model. Called with :class:`Probe` it tells what the model is to be given;
called with :class:`Answer` it computes the loss of an output that the model has given. A ``compute_loss`` of the user's
own, ``compute_loss_func`` and label smoothing so work for stages and divided layers as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from atorch_ns.errors import InputError

ComputeLoss = Callable[..., Any]
"""``Trainer.compute_loss``."""

Sample = tuple[dict[str, Any], dict[str, Any] | None, Any]
"""What the model is given, the batch (``None`` where no loss is wanted), and the number of items that the loss counts."""


class _Called(Exception):
    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.inputs = inputs


class _StandIn:
    """What ``compute_loss`` takes for the model: its attributes are the model's."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _get_name(self) -> str:
        return class_of(self._model)


class Probe(_StandIn):
    """A model that ends ``compute_loss`` with what it was called with."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Ends ``compute_loss``."""
        if args:
            raise InputError("compute_loss must call the model with names, as model(**inputs).")
        raise _Called(inputs)


class Answer(_StandIn):
    """A model that gives an output that is there already."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], output: Any) -> None:
        super().__init__(model)
        self._inputs, self._output, self._is_taken = inputs, output, False

    def __call__(self, **inputs: Any) -> Any:
        """The output."""
        if self._is_taken or inputs.keys() != self._inputs.keys():
            raise InputError(
                f"compute_loss called the model {'again ' if self._is_taken else ''}with {', '.join(inputs)} where it was "
                f"run with {', '.join(self._inputs)}: it must call it once, with the same inputs each time."
            )
        self._is_taken = True
        return self._output


def class_of(model: Any) -> str:
    """The name of a model's class, that of the model inside of adapters: by it ``Trainer`` knows whose labels are shifted."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__


def sample_of(compute_loss: ComputeLoss, model: Any, batch: Mapping[str, Any], num_items: Any) -> Sample:
    """What the model is given for a batch, and what the loss needs.

    Raises:
        InputError: if ``compute_loss`` calls no model.
    """
    try:
        compute_loss(Probe(model), dict(batch), num_items_in_batch=num_items)
    except _Called as called:
        return called.inputs, dict(batch), num_items
    raise InputError("compute_loss must call the model that it is given; it returned a loss without.")


def loss_of(compute_loss: ComputeLoss, model: Any, sample: Sample, output: Any) -> torch.Tensor:
    """The loss of one sample's output; 0 where none is wanted."""
    inputs, batch, num_items = sample
    if batch is None:
        return torch.zeros(())
    loss: torch.Tensor = compute_loss(
        Answer(model, inputs, output), dict(batch), num_items_in_batch=num_items
    )
    return loss


def flat_loss(loss_fn: Callable[..., torch.Tensor], outputs: Any, labels: Any) -> torch.Tensor:
    """Merak's loss: of logits and labels, both flattened where labels number the classes in the last dimension of logits."""
    if isinstance(outputs, torch.Tensor):
        logits = outputs
    else:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if isinstance(labels, torch.Tensor) and logits.shape[:-1] == labels.shape:
        return loss_fn(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return loss_fn(logits, labels)
