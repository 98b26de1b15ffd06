"""Losses of every kind, each equal to that of transformers' Trainer in one process."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from atorch_ns.errors import InputError
from atorch_ns.merak import MerakTrainer
from atorch_ns.merak.losses import TrainerLoss, flat_loss
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.merak.parts import Data, Run, assert_equal_runs, run_each, run_merak, run_plain

MICRO_BATCHES = 4
"""Of a step over all data ranks."""
FIELDS: dict[str, Any] = {"max_steps": 2, "eval_steps": 2}


def own_loss_func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum over what counts, divided by the number of items of the step."""
    logits = outputs["logits"].float().flatten(0, -2)
    total = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count


class Squares:
    """A ``compute_loss`` of the user's own, which takes labels out and returns what it is asked for."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The mean of squared logits and of the likelihood of labels."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"].float()
        loss = (logits**2).mean() + nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=-100
        )
        return (loss, outputs) if return_outputs else loss


class PlainSquares(Squares, Trainer):
    """In one process."""


class MerakSquares(Squares, MerakTrainer):
    """On ranks."""


class PlainFlat(Trainer):
    """What ``loss_fn`` stands for, as one would write it for transformers' Trainer."""

    loss_is_scaled_for_ga = False  # a mean over the micro-batch, as Merak's

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The mean over all labels."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss()(outputs["logits"].flatten(0, -2), labels.flatten())
        return (loss, outputs) if return_outputs else loss


def with_loss_func() -> dict[str, Any]:
    """Arguments with ``compute_loss_func``."""
    return {"compute_loss_func": own_loss_func}


def of_class(one: type[Trainer]) -> dict[str, Any]:
    """Arguments with a class of trainers."""
    return {"trainer": one}


def with_loss_fn() -> dict[str, Any]:
    """Arguments with Merak's ``loss_fn``."""
    return {"loss_fn": nn.CrossEntropyLoss()}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own": ({}, {}),
    "smoothing": ({"label_smoothing_factor": 0.2}, {"label_smoothing_factor": 0.2}),
    "compute_loss_func": ({"change": with_loss_func}, {"change": with_loss_func}),
    "compute_loss": (
        {"change": functools.partial(of_class, PlainSquares)},
        {"change": functools.partial(of_class, MerakSquares)},
    ),
    "loss_fn": ({"change": functools.partial(of_class, PlainFlat)}, {"change": with_loss_fn}),
}
"""Arguments in one process and on ranks."""


@functools.cache
def plain() -> dict[str, Run]:
    """Every kind in one process."""
    runs = {
        name: {"name": "gpt2", "accumulation": MICRO_BATCHES, **FIELDS, **mine}
        for name, (mine, _) in KINDS.items()
    }
    (found,) = run_ranks(run_each, 1, args=(run_plain, runs), timeout_s=100)
    return found


def _on(degrees: dict[str, int]) -> dict[str, Run]:
    accumulation = MICRO_BATCHES // degrees.get("dp", 1)
    runs = {
        name: {"degrees": degrees, "accumulation": accumulation, **FIELDS, **theirs}
        for name, (_, theirs) in KINDS.items()
    }
    return run_each(functools.partial(run_merak, "gpt2"), runs)


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2},
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_loss_is_that_of_one_process(degrees: dict[str, int]) -> None:
    ranks = 4 if len(degrees) == 2 else 2
    every = run_ranks(_on, ranks, args=(degrees,), timeout_s=200)
    for name, wanted in plain().items():
        assert all(found[name].logs == every[0][name].logs for found in every), name
        assert_equal_runs(every[0][name], wanted)
    losses = {name: run.logs[0]["loss"] for name, run in plain().items()}
    assert losses["smoothing"] != pytest.approx(losses["own"], abs=1e-4)
    assert losses["compute_loss"] != pytest.approx(losses["own"], abs=1e-4)


class Twice(MerakTrainer):
    """Calls the model with other inputs the second time."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss without labels."""
        ids = inputs["input_ids"]
        output = model(input_ids=ids, attention_mask=inputs["attention_mask"])
        return output["logits"].mean() + model(input_ids=ids)["logits"].mean()


class Never(MerakTrainer):
    """Calls no model."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A number."""
        return torch.zeros(())


class ByPlace(MerakTrainer):
    """Gives inputs by position."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss without labels."""
        return model(inputs["input_ids"])["logits"].mean()


class Unlabelled(Data):
    """Data without labels."""

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        found = super().__getitem__(place)
        found.pop("labels")
        return found


def _wrongly(change: Any) -> None:
    run_merak("gpt2", {"pp": 2}, 2, change, **FIELDS)


def unlabelled() -> dict[str, Any]:
    """Arguments with ``loss_fn`` and data that it has no use for."""
    return {"train_dataset": Unlabelled("gpt2"), "loss_fn": nn.CrossEntropyLoss()}


def no_function() -> dict[str, Any]:
    """Arguments with a ``loss_fn`` that is a text."""
    return {"loss_fn": "cross_entropy"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            functools.partial(of_class, Twice),
            "compute_loss called the model again with input_ids where it was run with",
        ),
        (functools.partial(of_class, Never), "compute_loss must call the given model"),
        (functools.partial(of_class, ByPlace), "compute_loss must call the model with keyword arguments"),
        (unlabelled, "loss_fn needs labels, which the batch does not have"),
        (no_function, "loss_fn must be callable"),
    ],
)
def test_losses_that_cannot_be_run_are_refused(change: Any, said: str) -> None:
    outcomes = catch_ranks(_wrongly, 2, args=(change,), timeout_s=60)
    assert any(isinstance(outcome.error, InputError) for outcome in outcomes)
    for outcome in outcomes:
        assert said in str(outcome.error), outcome.describe()


def test_a_plain_tensor_is_the_logits_of_the_whole_batch() -> None:
    outputs, labels = torch.randn(4, 3), torch.randn(4, 3)
    assert torch.equal(flat_loss(nn.MSELoss(), outputs, labels), nn.MSELoss()(outputs, labels))


@pytest.mark.parametrize(("logits", "labels"), [((2, 5, 3, 4), (2, 3, 4)), ((2, 6, 5), (2, 6))])
def test_classes_may_be_in_the_first_dimension_or_in_the_last(logits: Any, labels: Any) -> None:
    outputs, numbers = torch.randn(logits), torch.randint(0, 5, labels)
    flat = outputs.flatten(0, -2) if outputs.shape[:-1] == numbers.shape else outputs
    expected = nn.functional.cross_entropy(flat, numbers.flatten() if flat is not outputs else numbers)
    assert torch.equal(flat_loss(nn.CrossEntropyLoss(), {"logits": outputs}, numbers), expected)


@pytest.mark.parametrize(
    ("losses", "divides"),
    [
        ((4.0, 2.0), True),
        ((4.0, 4.0), False),
        ((-4.0, -2.0), True),
        ((-4.0, -4.0), False),
        ((4.0, 3.0), True),  # half of it is never divided
        ((float("nan"), float("nan")), None),
        ((0.0, 0.0), None),
    ],
)
def test_a_loss_that_is_divided_by_its_items_is_seen(
    losses: tuple[float, float], divides: bool | None
) -> None:
    loss, left = TrainerLoss(SimpleNamespace(compute_loss=called, model=nn.Identity())), list(losses)  # type: ignore[arg-type]
    loss.look(lambda _: SimpleNamespace(loss=torch.tensor(left.pop(0))), {"labels": torch.ones(1)}, 1)  # type: ignore[arg-type, return-value]
    assert loss.divides_by_items is divides


def called(model: Any, inputs: dict[str, Any], **_: Any) -> Any:
    """A ``compute_loss`` that calls its model."""
    return model(**inputs)
