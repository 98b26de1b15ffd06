"""Checkpoints under other layouts, folders of Hugging Face, and what is left out of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from atorch_ns.checkpoint import export_state_dict
from atorch_ns.errors import CheckpointError, RankError
from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.merak.checkpoints import last_in
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.merak.parts import Data, Run, accuracy, arguments, assert_equal_runs, logs_of, model, run_plain

MICRO_BATCHES = 4
"""Of a step over all data ranks."""
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}


@functools.cache
def plain() -> Run:
    """Four steps in one process."""
    (found,) = run_ranks(
        functools.partial(run_plain, "gpt2", MICRO_BATCHES, eval_strategy="no"), 1, timeout_s=100
    )
    return found


def trainer_of(folder: str, degrees: dict[str, Any], dropout: bool = False, **fields: Any) -> Any:
    """A trainer whose folder the test has named. Dropout is off where weights are compared with another layout's."""
    init(**degrees)
    given = {
        **arguments(folder, gradient_accumulation_steps=MICRO_BATCHES // degrees.get("dp", 1)),
        **SAVING,
        **fields,
    }
    return MerakTrainer(
        model("gpt2", dropout),
        MerakArguments(**given),
        train_dataset=Data("gpt2"),
        eval_dataset=Data("gpt2", 10),
        compute_metrics=accuracy,
    )


def trained(trainer: Any, resume: Any = None) -> Run:
    """What a training gives."""
    trainer.train(resume_from_checkpoint=resume)
    return Run(logs_of(trainer), export_state_dict(trainer.result), {})


def _saved(folder: str, degrees: dict[str, Any]) -> Run:
    return trained(trainer_of(folder, degrees))


def _resumed(folder: str, layouts: list[dict[str, Any]]) -> list[Run]:
    found = []
    for number, degrees in enumerate(layouts):
        trainer = trainer_of(f"{folder}/other-{number}", degrees, save_strategy="no")
        found.append(trained(trainer, f"{folder}/checkpoint-2"))
    return found


@pytest.mark.timeout(250)
def test_a_run_goes_on_under_another_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = run_ranks(_saved, 4, args=(folder, {"dp": 2, "pp": 2}), timeout_s=100)
    assert_equal_runs(saved[0], plain())
    layouts: list[dict[str, Any]] = [{"tp": 2}]
    resumed = [*run_ranks(_resumed, 2, args=(folder, layouts), timeout_s=100)[0]]
    resumed += run_ranks(_resumed, 1, args=(folder, [{}]), timeout_s=100)[0]
    for run in resumed:
        steps = [entry["step"] for entry in run.logs if "loss" in entry]
        assert steps == [1, 2, 3, 4]  # the first two are those of the checkpoint
        assert_equal_runs(run, plain())


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"pp": 4}])
def test_every_layout_saves_for_others(tmp_path: Path, degrees: dict[str, Any]) -> None:
    folder = str(tmp_path)
    run_ranks(_saved, 4, args=(folder, degrees), timeout_s=100)
    for run in run_ranks(_resumed, 2, args=(folder, [{"dp": 2}, {"tp": 2}]), timeout_s=100)[0]:
        assert_equal_runs(run, plain())


def _with_dropout(folder: str) -> list[Run]:
    degrees = {"dp": 2}
    whole = trained(trainer_of(f"{folder}/whole", degrees, dropout=True))
    again = trained(trainer_of(f"{folder}/again", degrees, dropout=True), f"{folder}/whole/checkpoint-2")
    other = trained(
        trainer_of(f"{folder}/other", degrees, dropout=True, no_load_rng=True, seed=7),
        f"{folder}/whole/checkpoint-2",
    )
    return [whole, again, other]


@pytest.mark.timeout(150)
def test_random_states_go_on(tmp_path: Path) -> None:
    for whole, again, other in run_ranks(_with_dropout, 2, args=(str(tmp_path),), timeout_s=100):
        assert again.logs == whole.logs
        assert other.logs != whole.logs


def _hugging_face(folder: str, degrees: dict[str, Any]) -> dict[str, torch.Tensor]:
    trainer = trainer_of(folder, degrees)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return export_state_dict(trainer.result)


def loaded_strictly(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder that ``from_pretrained`` reads, nothing missing and nothing left over."""
    found, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert not said["mismatched_keys"]
    return {name: tensor.detach().clone() for name, tensor in found.state_dict().items()}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("degrees", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)])
def test_folders_are_read_by_from_pretrained(tmp_path: Path, degrees: dict[str, Any]) -> None:
    weights = run_ranks(_hugging_face, 2, args=(str(tmp_path), degrees), timeout_s=100)[0]
    loaded = run_ranks(loaded_strictly, 1, args=(tmp_path / "final",))[0]
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    again = run_ranks(loaded_strictly, 1, args=(tmp_path / "checkpoint-4",))[0]
    for name, tensor in weights.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)


def _plain_folder(folder: str) -> None:
    run_plain("gpt2", MICRO_BATCHES, output_dir=folder, **{**SAVING, "max_steps": 2})


def _from_plain(folder: str) -> tuple[Run, dict[str, torch.Tensor]]:
    trainer = trainer_of(f"{folder}/next", {"pp": 2}, save_strategy="no", finetune=True, learning_rate=0.0)
    run = trained(trainer, f"{folder}/plain/checkpoint-2")
    return run, export_state_dict(trainer.result)


@pytest.mark.timeout(150)
def test_finetuning_takes_the_weights_alone(tmp_path: Path) -> None:
    run_ranks(_plain_folder, 1, args=(str(tmp_path / "plain"),), timeout_s=60)
    run, weights = run_ranks(_from_plain, 2, args=(str(tmp_path),), timeout_s=100)[0]
    assert [entry["step"] for entry in run.logs if "loss" in entry] == [
        1,
        2,
        3,
        4,
    ]  # finetune begins at step 0
    loaded = run_ranks(loaded_strictly, 1, args=(tmp_path / "plain" / "checkpoint-2",))[0]
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)  # the rate is 0


def _saves(folder: str) -> None:
    for name, fields in {
        "not": {"save_strategy": "no", "save_steps": 500},
        "save": {"save": True, "save_steps": 500},
        "both": {"save": True, "save_steps": 3},
    }.items():
        trainer_of(f"{folder}/{name}", {"dp": 2}, **fields).train()


@pytest.mark.timeout(100)
def test_checkpoints_are_saved_when_asked_for(tmp_path: Path) -> None:
    run_ranks(_saves, 2, args=(str(tmp_path),), timeout_s=80)
    found = {
        name: sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
        for name in ("not", "save", "both")
    }
    assert found == {"not": [], "save": ["checkpoint-4"], "both": ["checkpoint-3", "checkpoint-4"]}


def optimizer_steps(trainer: Any) -> set[int]:
    """How often parameters have been updated, by the optimizer's own count."""
    inner: Any = trainer.result.optim
    while not hasattr(inner, "state") or hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return {int(one["step"]) for one in inner.state.values() if "step" in one}


def _left_out(folder: str) -> dict[str, Any]:
    first = {"pp": 2}
    trained(trainer_of(f"{folder}/none", first, max_steps=2, no_save_optim=True, no_save_rng=True))
    trained(trainer_of(f"{folder}/all", first, max_steps=2))
    trainer = trainer_of(f"{folder}/next", first, save_strategy="no")
    run = trained(trainer, f"{folder}/none/checkpoint-2")
    return {"steps": optimizer_steps(trainer), "logs": run.logs}


def saved_names(folder: Path) -> list[str]:
    """The files of a checkpoint, by their paths in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.timeout(100)
def test_parts_are_left_out_of_checkpoints(tmp_path: Path) -> None:
    found = run_ranks(_left_out, 2, args=(str(tmp_path),), timeout_s=80)
    for rank in found:
        assert [entry["step"] for entry in rank["logs"] if "loss" in entry] == [1, 2, 3, 4]
        assert rank["steps"] == {2}  # the optimizer began anew at step 2
    without, whole = (tmp_path / "none" / "checkpoint-2", tmp_path / "all" / "checkpoint-2")
    assert any(name.startswith("rng_state") for name in saved_names(whole))
    assert not any(name.startswith("rng_state") for name in saved_names(without))
    sizes = [
        sum(path.stat().st_size for path in one.rglob("*") if path.is_file()) for one in (without, whole)
    ]
    assert sizes[0] < 0.7 * sizes[1]  # AdamW's states are twice the weights


def _not_loaded(folder: str) -> dict[str, Any]:
    first = {"dp": 2}
    trained(trainer_of(f"{folder}/all", first))
    found = {}
    for name, fields in {"usual": {}, "optimizer": {"no_load_optim": True}}.items():
        trainer = trainer_of(f"{folder}/{name}", first, save_strategy="no", zero_stage=0, **fields)
        run = trained(trainer, f"{folder}/all/checkpoint-2")
        found[name] = (optimizer_steps(trainer), run)
    return found


@pytest.mark.timeout(100)
def test_parts_of_checkpoints_are_not_loaded(tmp_path: Path) -> None:
    found = run_ranks(_not_loaded, 2, args=(str(tmp_path),), timeout_s=80)[0]
    assert found["usual"][0] == {4}
    assert_equal_runs(found["usual"][1], plain())
    assert found["optimizer"][0] == {2}  # no_load_optim; no_load_rng is in test_random_states_go_on


class WorseLater(TrainerCallback):
    """Makes later evaluations look worse than the first."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Replaces the metric by the step."""
        metrics["eval_worse"] = float(state.global_step)


def _best(folder: str) -> tuple[Any, dict[str, torch.Tensor]]:
    trainer = trainer_of(
        folder,
        {"tp": 2},
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="worse",
        greater_is_better=False,
        save_total_limit=2,
    )
    trainer.add_callback(WorseLater())
    trainer.train()
    return trainer.state.best_model_checkpoint, export_state_dict(trainer.result)


@pytest.mark.timeout(100)
def test_the_best_checkpoint_and_the_last_are_kept(tmp_path: Path) -> None:
    best, weights = run_ranks(_best, 2, args=(str(tmp_path),), timeout_s=80)[0]
    assert Path(best).name == "checkpoint-2"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    loaded = run_ranks(loaded_strictly, 1, args=(tmp_path / "checkpoint-2",))[0]
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)


def _resume(folder: str, what: Any) -> None:
    trained(trainer_of(folder, {"dp": 2}), what)


@pytest.mark.parametrize("what", [True, "no/such/folder"])
def test_a_checkpoint_that_is_not_there_is_named_on_all_ranks(tmp_path: Path, what: Any) -> None:
    for outcome in catch_ranks(_resume, 2, args=(str(tmp_path), what), timeout_s=60):
        assert isinstance(outcome.error, (CheckpointError, RankError)), outcome.describe()
        assert "resume_from_checkpoint" in str(outcome.error)


def _last(folder: str) -> list[int]:
    trained(trainer_of(folder, {"dp": 2}, max_steps=3))
    trainer = trainer_of(folder, {"dp": 2}, save_strategy="no")
    return [int(entry["step"]) for entry in trained(trainer, True).logs if "loss" in entry]


@pytest.mark.timeout(100)
def test_a_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(_last, 2, args=(str(tmp_path),), timeout_s=80) == [[1, 2, 3, 4]] * 2
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path: Path) -> None:
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_in(str(tmp_path)) == str(tmp_path / "checkpoint-12")
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert last_in(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert last_in(str(tmp_path / "checkpoint-2")) is None
