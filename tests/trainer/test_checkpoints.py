"""Checkpoints of the Trainer: resumption bit for bit and under other plans, best and last, what a crash leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atorch_ns.errors import CheckpointError, InputError
from atorch_ns.testing.workers import run_ranks
from atorch_ns.trainer import (
    CheckpointConfig,
    DatasetConfig,
    HookConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    Trainer,
    TrainHook,
)
from tests.trainer.parts import Draws, Model
from tests.trainer.test_runs import args_of, compare, plain, run, weights


def saved(folder: Path, plan: int, steps: int, resume: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    """A run with dropout, data that is drawn and a scheduler, to a number of steps."""
    config = CheckpointConfig(save_dir=f"{folder}/checkpoints", resume_from=resume)
    given: dict[str, Any] = {
        "model": ModelConfig(type=Model, args={"dropout": 0.2}),
        "dataset": DatasetConfig(type=Draws, train_args={"size": 24}),
        "lr_scheduler": LRSchedulerConfig(
            type=torch.optim.lr_scheduler.StepLR, args={"step_size": 1, "gamma": 0.9}
        ),
        "checkpoint": config,
        "max_train_steps": steps,
        "pas_policy": "dp",
    }
    return run(str(folder), plan, given | fields)


@pytest.mark.parametrize("stop", [3, 4, 6], ids=["end of an epoch", "in the middle", "end of the second"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_steps_are_four_and_six_bit_for_bit(tmp_path: Path, ranks: int, stop: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def on_ranks(*given: Any) -> list[dict[str, Any]]:
        return [saved(*given)] if ranks == 1 else run_ranks(saved, ranks, args=given)

    wanted = on_ranks(whole, 1, 10, None, {})
    first = on_ranks(parts, 1, stop, None, {})
    second = on_ranks(parts, 1, 10, "last", {})
    for one, before, after in zip(wanted, first, second, strict=True):
        assert before["losses"] + after["losses"] == one["losses"]
    mine, theirs = weights(parts), weights(whole)
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


AGAIN: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one process": (1, 1, {"pas_policy": "dp"}),
    "tp": (2, 2, {"pas_policy": "tp"}),
    "zero": (2, 1, {"pas_policy": "dp", "use_zero": True}),
    "four ranks": (4, 1, {"pas_policy": "dp"}),
    "stages": (2, 2, {"pas_policy": "pp", "pas_config": {"pipeline_nmicros": 4}}),
}


def resumed(folder: str, plan: int, steps: int, resume: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    config = CheckpointConfig(save_dir=f"{folder}/checkpoints", resume_from=resume)
    return run(folder, plan, {"checkpoint": config, "max_train_steps": steps, **fields})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(resumed, 2, args=(str(folder), 1, 2, None, {"pas_policy": "dp"}))
    return folder


@pytest.mark.parametrize("merged", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("what", AGAIN)
def test_another_plan_on_another_number_of_ranks_goes_on(
    tmp_path: Path, two_ranks: Path, what: str, merged: bool
) -> None:
    ranks, plan, fields = AGAIN[what]
    place = str(two_ranks / "checkpoints" / "last")
    if merged:
        Trainer.merge_checkpoint([place + "/0.ckpt", place + "/1.ckpt"], place := str(tmp_path / "one.ckpt"))
    given = (str(tmp_path), plan, 5, place, fields)
    found = [resumed(*given)] if ranks == 1 else run_ranks(resumed, ranks, args=given, timeout_s=120)
    wanted = plain()
    compare(found, tmp_path, {**wanted, "losses": wanted["losses"][2:]})


def test_a_merged_file_is_what_plain_modules_load(two_ranks: Path, tmp_path: Path) -> None:
    Trainer.merge_checkpoints([str(two_ranks / "checkpoints" / "last")], str(tmp_path / "one.ckpt"))
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    model = Model()
    model.load_state_dict(found["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert found["train_status"]["finished_train_steps"] == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_another_precision_goes_on(tmp_path: Path, two_ranks: Path, dtype: str) -> None:
    place = str(two_ranks / "checkpoints" / "last")
    found = resumed(str(tmp_path), 1, 5, place, {"pas_policy": "dp", "precision": dtype})
    assert found["losses"] == pytest.approx(plain()["losses"][2:], abs=0.05 if dtype == "bf16" else 2e-5)
    assert weights(tmp_path)["head.weight"].dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)


class Adds(TrainHook):
    """Adds to checkpoints, and keeps what it is given back."""

    def on_save_checkpoint(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"rank": trainer.rank, "tensor": torch.ones(2) * trainer.rank}

    def on_load_checkpoint(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        self.given = checkpoint["mine"]
        assert checkpoint["train_status"]["finished_train_steps"] == 1


def adding(folder: str, steps: int, resume: str | None) -> Any:
    config = CheckpointConfig(save_dir=f"{folder}/checkpoints", resume_from=resume)
    trainer = Trainer(
        train_args=args_of(
            folder, pas_policy="dp", hook=HookConfig(type=Adds), checkpoint=config, max_train_steps=steps
        )
    )
    trainer.run()
    return getattr(trainer.hook._called["on_load_checkpoint"][0].__self__, "given", None)


def test_hooks_find_again_what_they_have_added(tmp_path: Path) -> None:
    run_ranks(adding, 2, args=(str(tmp_path), 1, None))
    one = run_ranks(adding, 2, args=(str(tmp_path), 1, "last"))
    assert [found["rank"] for found in one] == [0, 1]
    found = adding(str(tmp_path), 1, "last")
    assert [entry["rank"] for entry in found] == [0, 1]
    Trainer.merge_checkpoint([str(tmp_path / "checkpoints/last")], str(tmp_path / "one.ckpt"))
    found = adding(str(tmp_path / "other"), 1, str(tmp_path / "one.ckpt"))
    assert torch.equal(found[1]["tensor"], torch.ones(2))


def trained(folder: Path, steps: int, **fields: Any) -> Trainer:
    config = {"save_dir": f"{folder}/checkpoints", "every_n_train_steps": 1}
    config |= fields.pop("checkpoint", {})
    trainer = Trainer(
        train_args=args_of(
            str(folder),
            pas_policy="dp",
            checkpoint=CheckpointConfig(**config),
            max_train_steps=steps,
            **fields,
        )
    )
    trainer.run()
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_best_is_the_lowest_loss_also_after_a_resumption(tmp_path: Path, links: bool) -> None:
    """A learning rate that is far too high after the second step."""
    config = {"symlink_best_and_last": links, "keep_last_n_checkpoints": 1}
    trained(tmp_path, 2, checkpoint=config)
    wild = OptimizerConfig(type=torch.optim.SGD, args={"lr": 1e4})
    resumed_with = {**config, "resume_from": "last"}
    with pytest.raises(CheckpointError, match="optimizer"):
        trained(tmp_path, 4, checkpoint=resumed_with, optimizer=wild)
    worse = LRSchedulerConfig(
        type=torch.optim.lr_scheduler.LambdaLR, args={"lr_lambda": lambda _: 1e4}, interval="step"
    )
    trained(
        tmp_path, 4, checkpoint=resumed_with, lr_scheduler=worse
    )  # the fourth is the first to be too high
    best = weights(tmp_path, "best")
    trainer = trained(tmp_path, 6, checkpoint=resumed_with, lr_scheduler=worse)
    assert trainer.train_status.best_loss < (trainer.train_status.val_loss or 0)
    found = weights(tmp_path, "best")
    assert all(torch.equal(found[name], value) for name, value in best.items())
    kept = ["0000-0003"] if links else []
    assert names(tmp_path) == [*kept, "0001-0006", "best", "last"]
    assert (tmp_path / "checkpoints" / "best").is_symlink() is links


def test_without_validation_data_best_is_the_lowest_training_loss(tmp_path: Path) -> None:
    from tests.trainer.parts import Dataset

    data = DatasetConfig(type=Dataset, train_args={"size": 20})
    trainer = trained(tmp_path, 4, dataset=data)
    assert trainer.train_status.val_loss is None
    losses = plain(num_steps=4)["losses"]
    assert trainer.train_status.best_loss == pytest.approx(min(losses), abs=1e-5)
    assert (tmp_path / "checkpoints" / "best").resolve().name.endswith(f"{losses.index(min(losses)) + 1:04d}")


def test_what_is_not_there_yet_is_no_error_and_what_never_was_is(tmp_path: Path) -> None:
    trainer = trained(tmp_path, 1, checkpoint={"resume_from": "best"})
    assert trainer.train_status.finished_train_steps == 1
    with pytest.raises(InputError, match="no such file or folder"):
        trained(tmp_path, 1, checkpoint={"resume_from": str(tmp_path / "nothing")})


def test_damage_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    (path,) = (tmp_path / "checkpoints" / "0000-0001" / "step-1").glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC-32"):
        trained(tmp_path, 2, checkpoint={"resume_from": "last"})


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_of_what_ranks_have_added_is_found(tmp_path: Path, harm: str) -> None:
    trained(tmp_path, 1)
    path = tmp_path / "checkpoints" / "0000-0001" / "0.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if harm == "flip" else content[:100])
    if harm == "remove":
        path.unlink()
    with pytest.raises(CheckpointError, match=r"damaged.*0\.ckpt"):
        trained(tmp_path, 2, checkpoint={"resume_from": "last"})


def test_what_hooks_have_added_names_its_file_where_a_class_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 1)

    load = torch.load

    def fail(file: Any, **options: Any) -> Any:
        if str(file).endswith("0.ckpt"):
            raise ModuleNotFoundError("No module named 'hooks'")
        return load(file, **options)

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(CheckpointError, match=r"0\.ckpt, .* No module named 'hooks'\. If it lacks a class"):
        trained(tmp_path, 2, checkpoint={"resume_from": "last"})


def test_damage_of_a_merged_file_is_found(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    merged = tmp_path / "one.ckpt"
    Trainer.merge_checkpoint([str(tmp_path / "checkpoints" / "last")], str(merged))
    content = bytearray(merged.read_bytes())
    place = content.find(torch.load(merged)["model"]["head.weight"].numpy().tobytes()[:64])
    content[place] ^= 1
    merged.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        trained(tmp_path, 2, checkpoint={"resume_from": str(merged)})


class Worse(TrainHook):
    """Validation losses of one's own."""

    def __init__(self) -> None:
        self.losses = iter([0.4, float("nan"), 0.5, 0.45])

    def on_val_end(self, trainer: Trainer, val_loss: float) -> None:
        trainer.train_status.val_loss = next(self.losses)


def test_a_loss_that_is_not_a_number_does_not_make_best_forgotten(tmp_path: Path) -> None:
    trainer = trained(tmp_path, 4, hook=HookConfig(type=Worse), val_every_n_epochs=None)
    assert trainer.train_status.best_loss == 0.4
    assert (tmp_path / "checkpoints" / "best").resolve().name == "0000-0001"


def test_folders_that_cannot_be_written_are_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        with pytest.raises(CheckpointError, match=r"checkpoint\.save_dir: cannot write"):
            trained(tmp_path, 1, checkpoint={"save_dir": str(tmp_path / place)})


def test_the_oldest_go_also_where_an_earlier_run_had_more_steps(tmp_path: Path) -> None:
    trained(tmp_path, 4, checkpoint={"keep_last_n_checkpoints": 2})
    trained(tmp_path, 2, checkpoint={"keep_last_n_checkpoints": 2, "save_best": False})
    assert {"0000-0001", "0000-0002"} <= set(names(tmp_path))
    assert "0000-0003" not in names(tmp_path)


def test_best_of_another_folder_is_none_here(tmp_path: Path) -> None:
    trained(tmp_path / "one", 2)
    last = str(tmp_path / "one" / "checkpoints" / "last")
    trained(tmp_path / "two", 3, checkpoint={"resume_from": last})
    assert (tmp_path / "two" / "checkpoints" / "best").exists()
    shutil.rmtree((tmp_path / "one" / "checkpoints" / "last").resolve())
    with pytest.raises(CheckpointError, match="which does not exist"):
        trained(tmp_path / "one", 3, checkpoint={"resume_from": "last"})


class Tied(Model):
    """The head's weights are those of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_merged_files_have_all_names_of_tied_weights_and_the_models_order(tmp_path: Path) -> None:
    adam = OptimizerConfig(type=backwards)
    trained(tmp_path, 1, model=ModelConfig(type=Tied), optimizer=adam)
    Trainer.merge_checkpoint([str(tmp_path / "checkpoints" / "last")], str(tmp_path / "one.ckpt"))
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    model = Tied()
    model.load_state_dict(found["model"])
    parameters = list(model.parameters())
    for place, state in found["optimizer"]["state"].items():
        assert state["exp_avg"].shape == parameters[place].shape


def backwards(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that is given parameters in another order."""
    return torch.optim.Adam(list(parameters)[::-1], lr=1e-2)


class Dies(TrainHook):
    """Fails when a checkpoint is saved, from the second on."""

    def on_save_checkpoint(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        if trainer.train_status.finished_train_steps > 1:
            checkpoint["bad"] = lambda: None  # which no file can hold


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write"):
        trained(tmp_path, 3, hook=HookConfig(type=Dies))
    assert (tmp_path / "checkpoints" / "last").resolve().name == "0000-0001"
    assert list((tmp_path / "checkpoints").glob(".*"))
    trainer = trained(tmp_path, 3, checkpoint={"resume_from": "last"})
    assert trainer.train_status.finished_train_steps == 3
    assert "0001-0003" not in names(tmp_path)
    assert names(tmp_path) == ["0000-0001", "0000-0002", "0000-0003", "best", "last"]


def test_a_save_that_fails_in_the_place_of_another_leaves_that(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    first = (tmp_path / "checkpoints" / "0000-0001").resolve()
    with pytest.raises(CheckpointError, match="cannot write"):
        trained(tmp_path, 3, hook=HookConfig(type=Dies), checkpoint={"resume_from": str(first)})
    assert trained(tmp_path, 3, checkpoint={"resume_from": "last"}).train_status.finished_train_steps == 3


@pytest.mark.parametrize("links", [True, False])
def test_a_crash_between_two_renames_loses_nothing(tmp_path: Path, links: bool) -> None:
    trained(tmp_path, 2, checkpoint={"symlink_best_and_last": links})
    folder = tmp_path / "checkpoints"
    moved = "0000-0002" if links else "last"
    (folder / moved).rename(folder / f".{moved}.old")
    status = trained(
        tmp_path, 3, checkpoint={"resume_from": "last", "symlink_best_and_last": links}
    ).train_status
    assert status.finished_train_steps == 3
    assert (folder / "last").resolve().exists()


def test_a_crash_while_a_copy_takes_the_place_of_a_link_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, 2, checkpoint={"symlink_best_and_last": True})

    rename = Path.rename

    def fail(draft: Path, target: Path) -> Path:
        if draft.name == ".last.tmp":
            raise OSError("killed")
        return rename(draft, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        patch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="killed"):
            trained(tmp_path, 3, checkpoint={"resume_from": "last", "symlink_best_and_last": False})
    caplog.set_level("INFO", "atorch_ns")
    assert trained(tmp_path, 3, checkpoint={"resume_from": "last"}).train_status.finished_train_steps == 3
    assert "begins anew" not in caplog.text


def test_nothing_is_saved_where_nothing_shall_be(tmp_path: Path) -> None:
    trained(tmp_path, 2, checkpoint={"no_save": True})
    assert not (tmp_path / "checkpoints").exists()
    assert not dist.is_initialized()
