"""The loss as transformers' Trainer computes it, of a model that runs elsewhere.

``Trainer.compute_loss(model, inputs)`` calls the model. Called with :class:`Probe`, it tells the model's
inputs; called with :class:`Answer`, it computes the loss of an output. So a ``compute_loss`` of the user's
own, ``compute_loss_func`` and label smoothing work for stages and divided layers as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer

from atorch_ns.data import StepOutput
from atorch_ns.errors import InputError

Sample = tuple[dict[str, Any], dict[str, Any] | None, Any]
"""The model's inputs, the batch (``None`` if no loss is wanted), and the number of items for the loss."""


class _Called(Exception):
    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.inputs = inputs


class _StandIn:
    """Stand-in for the model in ``compute_loss``, with the model's attributes."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _get_name(self) -> str:
        return class_of(self._model)


class Probe(_StandIn):
    """A model that ends ``compute_loss`` with the arguments of its call."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Ends ``compute_loss``."""
        if args:
            raise InputError("compute_loss must call the model with keyword arguments, as model(**inputs).")
        raise _Called(inputs)


class Answer(_StandIn):
    """A model that returns an existing output."""

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
    """The class name of a model, or of the one inside adapters. ``Trainer`` shifts labels of some classes."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__


class TrainerLoss:
    """The loss of a Trainer, for its job.

    Attributes:
        divides_by_items: whether losses are divided by the given number of items. ``None`` before a step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # whose compute_loss is typed to take a Module
        self.divides_by_items: bool | None = None

    def sample(self, batch: Mapping[str, Any], num_items: Any) -> Sample:
        """The model's inputs for a batch, and the data for its loss.

        Raises:
            InputError: if ``compute_loss`` calls no model.
        """
        try:
            self._trainer.compute_loss(Probe(self._trainer.model), dict(batch), num_items_in_batch=num_items)
        except _Called as called:
            return called.inputs, dict(batch), num_items
        raise InputError("compute_loss must call the given model; it returned a loss without calling it.")

    def of(self, sample: Sample, output: Any) -> torch.Tensor:
        """The loss of one sample's output, or 0 if none is wanted.

        A mean over the items of a micro-batch becomes its share of the mean over the whole step.
        """
        inputs, batch, num_items = sample
        if batch is None:
            return torch.zeros(())
        answer = Answer(self._trainer.model, inputs, output)
        loss: torch.Tensor = self._trainer.compute_loss(answer, dict(batch), num_items_in_batch=num_items)
        if self.divides_by_items is not False or num_items is None:
            return loss
        share: torch.Tensor = loss * (self.count_items(batch) / num_items)
        return share

    def count_items(self, batch: Mapping[str, Any]) -> Any:
        """The number of items of this rank's batch alone."""
        trainer = self._trainer
        averages = trainer.args.average_tokens_across_devices
        trainer.args.average_tokens_across_devices = False  # it would sum over ranks
        try:
            return trainer._get_num_items_in_batch([dict(batch)], trainer.args.device)
        finally:
            trainer.args.average_tokens_across_devices = averages

    def adds_up(self, num_items: Any, has_loss_fn: bool) -> bool:
        """Returns whether micro-batch losses add up to the step's, as if divided by its number of items."""
        trainer = self._trainer
        if trainer.loss_is_scaled_for_ga is not None:
            return bool(trainer.loss_is_scaled_for_ga)
        if has_loss_fn:
            return False
        return trainer.compute_loss_func is not None or (
            trainer.model_accepts_loss_kwargs and num_items is not None
        )

    def look(
        self, infer: Callable[[list[Sample]], StepOutput], batch: Mapping[str, Any], num_items: Any
    ) -> None:
        """Determines whether the loss is divided by the given number of items. Collective.

        transformers assumes so for every model whose forward takes ``**kwargs``. Some, such as T5 and BERT,
        ignore the number. Two forward passes decide: twice the number halves a divided loss. A part
        that is never divided, such as a router's, leaves the result between the half and the whole.
        """
        once, twice = (float(infer([self.sample(batch, num_items * times)]).loss) for times in (1, 2))
        if math.isfinite(once) and math.isfinite(twice) and once:  # otherwise the next micro-batch decides
            self.divides_by_items = abs(twice - once) > 0.1 * abs(once)  # a divided loss halves, others stay


def flat_loss(loss_fn: Callable[..., torch.Tensor], outputs: Any, labels: Any) -> torch.Tensor:
    """Merak's loss of logits and labels, both flattened if labels index the logits' last dimension."""
    if isinstance(outputs, torch.Tensor):
        logits = outputs
    else:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if isinstance(labels, torch.Tensor) and logits.shape[:-1] == labels.shape:  # labels number the classes
        return loss_fn(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return loss_fn(logits, labels)
