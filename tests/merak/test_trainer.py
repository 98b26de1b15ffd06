"""MerakTrainer as transformers' Trainer: predictions, callbacks, trackers, order of data, and what it refuses."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from atorch_ns.checkpoint import export_state_dict
from atorch_ns.errors import InputError
from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.merak.parts import (
    QUICK,
    Data,
    accuracy,
    arguments,
    assert_equal_runs,
    logs_of,
    model,
    run_merak,
    run_plain,
)

MICRO_BATCHES = 4
"""Of a step over all data ranks."""


class Seen(Data):
    """Data that keeps the numbers of the samples that are read."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size)
        self.places: list[int] = []

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        self.places.append(place)
        return super().__getitem__(place)


class FromLastOnwards(TrainerCallback):
    """Says that evaluations do not improve."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """The metric grows with the steps."""
        metrics["eval_rising"] = float(state.global_step)


def trainer_of(folder: str, degrees: dict[str, Any], **fields: Any) -> Any:
    """A trainer on ranks, or transformers' own where there are no degrees. Other keys than of arguments come first."""
    usual: dict[str, Any] = {"train_dataset": Data("gpt2"), "eval_dataset": Data("gpt2", 10)}
    given = {key: fields.pop(key, value) for key, value in usual.items()}
    given |= {key: fields.pop(key) for key in ("callbacks", "compute_metrics") if key in fields}
    if not degrees:
        args = TrainingArguments(**arguments(folder, gradient_accumulation_steps=MICRO_BATCHES, **fields))
        return Trainer(model("gpt2"), args, **given)
    init(**degrees)
    each = MICRO_BATCHES // degrees.get("dp", 1)
    own = MerakArguments(**arguments(folder, gradient_accumulation_steps=each, **fields))
    return MerakTrainer(model("gpt2"), own, **given)


def _uses(folder: str, degrees: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_of(folder, degrees, compute_metrics=accuracy, eval_strategy="no")
    before = trainer.evaluate()
    begun = trainer.train()
    after = trainer.evaluate()
    predicted = trainer.predict(Data("gpt2", 8))
    trainer.log({"of mine": 1.0})
    kept = ("eval_loss", "eval_accuracy", "eval_logits")
    return {
        "before": {key: before[key] for key in kept},
        "after": {key: after[key] for key in kept},
        "steps": begun.global_step,
        "loss": begun.training_loss,
        "predictions": torch.as_tensor(predicted.predictions),
        "labels": predicted.label_ids.tolist(),
        "test": {key: predicted.metrics[f"test_{key}"] for key in ("loss", "accuracy")},
        "logged": trainer.state.log_history[-1]["of mine"],
    }


@pytest.mark.timeout(150)
@pytest.mark.parametrize("degrees", [{"dp": 2}, {"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_training_evaluation_and_prediction_are_those_of_one_process(
    degrees: dict[str, Any], tmp_path: Path
) -> None:
    (plain,) = run_ranks(_uses, 1, args=(str(tmp_path), {}), timeout_s=60)
    for found in run_ranks(_uses, 2, args=(str(tmp_path), degrees), timeout_s=100):
        torch.testing.assert_close(found.pop("predictions"), plain["predictions"], rtol=1e-4, atol=1e-5)
        for key, value in found.items():
            wanted = plain[key]
            if isinstance(value, dict):
                assert value == pytest.approx(wanted, abs=1e-5), key
            else:
                assert value == (pytest.approx(wanted, abs=1e-5) if isinstance(value, float) else wanted), key
        assert found["after"]["eval_loss"] != pytest.approx(found["before"]["eval_loss"], abs=1e-4)


def _stopping(folder: str, degrees: dict[str, Any]) -> tuple[int, list[str]]:
    trainer = trainer_of(
        folder,
        degrees,
        max_steps=10,
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="rising",
        greater_is_better=False,
        report_to=["tensorboard"],
        callbacks=[FromLastOnwards(), EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    return trainer.state.global_step, sorted(path.name for path in Path(folder).rglob("events.out*"))


@pytest.mark.timeout(100)
def test_early_stopping_and_trackers_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    pytest.importorskip("tensorboard")
    every = run_ranks(_stopping, 2, args=(str(tmp_path), {"pp": 2}), timeout_s=80)
    assert [steps for steps, _ in every] == [3, 3]  # the first is the best, two more are not
    assert len(every[0][1]) == 1  # of the first rank alone


def _orders(folder: str, degrees: dict[str, Any]) -> list[list[int]]:
    found = []
    for seed in (1, 2):
        data = Seen("gpt2", 16)
        trainer = trainer_of(
            folder, degrees, train_dataset=data, max_steps=4, eval_strategy="no", data_seed=seed
        )
        trainer.train()
        found.append(data.places)
    return found


@pytest.mark.timeout(100)
def test_the_order_of_data_changes_with_epoch_and_seed(tmp_path: Path) -> None:
    (plain,) = run_ranks(_orders, 1, args=(str(tmp_path), {}), timeout_s=60)
    for found in run_ranks(_orders, 2, args=(str(tmp_path), {"pp": 2}), timeout_s=60):
        for places, wanted in zip(found, plain, strict=True):
            read = places[-32:]  # a batch is looked at before
            assert read == wanted[-32:]
            assert sorted(read[:16]) == sorted(read[16:]) == list(range(16))  # two epochs
            assert read[:16] != read[16:]
        assert found[0][-32:] != found[1][-32:]
    by_rank = run_ranks(_orders, 2, args=(str(tmp_path), {"dp": 2}), timeout_s=60)
    first, second = (set(found[0][-8:]) for found in by_rank)
    assert first.isdisjoint(second)  # ranks of dp see different data
    assert first | second == set(range(16))


def _exact(folder: str) -> list[tuple[int, float]]:
    found = []
    for fields in ({"max_steps": 7}, {"max_steps": -1, "num_train_epochs": 2}):
        trainer = trainer_of(folder, {"dp": 2}, train_dataset=Data("gpt2", 20), eval_strategy="no", **fields)
        trainer.train()
        found.append((trainer.state.global_step, float(trainer.state.epoch)))
    return found


@pytest.mark.timeout(100)
def test_max_steps_and_epochs_are_exact(tmp_path: Path) -> None:
    # 20 samples in steps of 8: three steps an epoch, of which the last has 4.
    for (steps, _), (of_epochs, epochs) in run_ranks(_exact, 2, args=(str(tmp_path),), timeout_s=80):
        assert steps == 7
        assert of_epochs == 6
        assert epochs == 2.0


def _ended(folder: str) -> int:
    data = Seen("gpt2", 40)
    trainer = trainer_of(folder, {"dp": 2}, eval_dataset=data, eval_iters=2)
    trainer.evaluate()
    data.places.clear()
    trainer.evaluate()
    return len(data.places)


@pytest.mark.timeout(60)
def test_an_evaluation_ends_after_eval_iters(tmp_path: Path) -> None:
    for count in run_ranks(_ended, 2, args=(str(tmp_path),), timeout_s=50):
        assert 4 <= count <= 6  # two batches of two samples, and the one that is looked at before


def untied() -> dict[str, Any]:
    """Arguments with a model whose head has weights of its own, equal to those of the embedding at first."""
    whole: Any = model("gpt2")
    head = whole.transformer.wte.weight.detach().clone()
    whole.config.tie_word_embeddings = False
    whole.lm_head.weight = nn.Parameter(head)
    return {"model": whole}


@pytest.mark.timeout(100)
def test_tied_weights_are_trained_apart_when_asked_for() -> None:
    (plain,) = run_ranks(functools.partial(run_plain, "gpt2", 2, untied, **QUICK), 1, timeout_s=60)
    run = functools.partial(run_merak, "gpt2", {"pp": 2}, 2, no_tie_modules=True, **QUICK)
    found = run_ranks(run, 2, timeout_s=60)[0]
    assert_equal_runs(found, plain)
    assert not torch.equal(found.weights["lm_head.weight"], found.weights["transformer.wte.weight"])


def own_optimizer() -> dict[str, Any]:
    """Arguments with an optimizer that the user has made."""
    whole = model("gpt2")
    parameters = dict(whole.named_parameters())
    biases = [one for name, one in parameters.items() if name.endswith("bias")]
    others = [one for name, one in parameters.items() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.3}, {"params": biases, "lr": 1e-4}]
    return {"model": whole, "optimizers": (torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.0), None)}


@pytest.mark.timeout(100)
def test_an_optimizer_of_one_s_own_keeps_its_groups() -> None:
    (plain,) = run_ranks(functools.partial(run_plain, "gpt2", 2, own_optimizer, **QUICK), 1, timeout_s=60)
    run = functools.partial(run_merak, "gpt2", {"tp": 2}, 2, own_optimizer, **QUICK)
    assert_equal_runs(run_ranks(run, 2, timeout_s=60)[0], plain)


class PlainMaker(Trainer):
    """A trainer whose subclass makes the optimizer, of the model that it has."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """SGD with another learning rate for biases."""
        biases = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        self.optimizer = torch.optim.SGD([{"params": others}, {"params": biases, "lr": 0.5}], lr=0.05)
        return self.optimizer


class MerakMaker(PlainMaker, MerakTrainer):
    """On ranks."""


def test_a_subclass_makes_the_optimizer() -> None:
    plain_run = functools.partial(run_plain, "gpt2", 2, functools.partial(dict, trainer=PlainMaker), **QUICK)
    run = functools.partial(
        run_merak, "gpt2", {"tp": 2}, 2, functools.partial(dict, trainer=MerakMaker), **QUICK
    )
    assert_equal_runs(run_ranks(run, 2, timeout_s=60)[0], plain_run())


def test_methods_of_merak_s_own_trainer_are_refused_by_name() -> None:
    class Odd(MerakTrainer):
        def get_loss_fn(self) -> Any:
            """Merak's."""

        def create_lr_scheduler(self, optimizer: Any) -> Any:
            """Merak's."""

    with pytest.raises(InputError, match=r"get_loss_fn \(give loss_fn=.*create_lr_scheduler \(override"):
        Odd(model("gpt2"), MerakArguments(output_dir="out", use_cpu=True))


def _refused(folder: str, what: str) -> None:
    if what == "no init":
        MerakTrainer(model("gpt2"), MerakArguments(**arguments(folder, **QUICK)))
    init(dp=2)
    args = MerakArguments(**arguments(folder, **QUICK))
    if what == "plain arguments":
        MerakTrainer(model("gpt2"), TrainingArguments(**arguments(folder)))  # type: ignore[arg-type]
    if what == "no job":
        export_state_dict(MerakTrainer(model("gpt2"), args).result)
    optimizer = torch.optim.SGD(model("gpt2").parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    if what == "scheduler":
        MerakTrainer(model("gpt2"), args, optimizers=(optimizer, scheduler))
    MerakTrainer(model("gpt2"), args, optimizers=(optimizer, None), train_dataset=Data("gpt2")).train()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no init", "call init"),
        ("plain arguments", "MerakTrainer needs args, a MerakArguments"),
        ("no job", "no job exists before"),
        ("scheduler", "the scheduler belongs to an optimizer of the undivided model"),
        ("other parameters", "parameters that are not the model's"),
    ],
)
def test_what_does_not_fit_is_refused(what: str, said: str, tmp_path: Path) -> None:
    for outcome in catch_ranks(_refused, 2, args=(str(tmp_path), what), timeout_s=60):
        assert isinstance(outcome.error, InputError), outcome.describe()
        assert said in str(outcome.error)


def _leaves(folder: str, leaf_modules: tuple[Any, ...]) -> list[dict[str, float]]:
    init(pp=2)
    args = MerakArguments(**arguments(folder, **QUICK))
    trainer = MerakTrainer(model("gpt2"), args, train_dataset=Data("gpt2"), leaf_modules=leaf_modules)
    trainer.train()
    return logs_of(trainer)


@pytest.mark.timeout(100)
def test_leaf_modules_are_classes_or_names(tmp_path: Path) -> None:
    found = run_ranks(_leaves, 2, args=(str(tmp_path), ("GPT2Attention",)), timeout_s=60)
    assert found[0] == found[1]
    for outcome in catch_ranks(_leaves, 2, args=(str(tmp_path), ("NoSuchModule",)), timeout_s=60):
        assert "NoSuchModule" in str(outcome.error), outcome.describe()
