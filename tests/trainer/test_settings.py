"""Settings of the Trainer: every field of its arguments does what it says."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from atorch_ns.errors import InputError
from atorch_ns.strategy import Strategy
from atorch_ns.testing.workers import run_ranks
from atorch_ns.trainer import (
    CheckpointConfig,
    ComputeConfig,
    DataloaderConfig,
    DatasetConfig,
    DatasetSamplerConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    Trainer,
    TrainerArgs,
    WandbLogger,
)
from atorch_ns.trainer.trainer import train
from tests.trainer.parts import Dataset, Lines, Model, Stream, collated, seeded
from tests.trainer.test_runs import args_of, plain, run

COVERED = {
    "model optimizer dataset hook": "test_runs",
    "checkpoint lr_scheduler": "test_checkpoints",
    "micro_batch_size global_batch_size grad_accumulation_steps": "test_config",
}
"""Fields that other files try."""


def trained(folder: Path, **fields: Any) -> Trainer:
    trainer = Trainer(train_args=args_of(str(folder), **{"pas_policy": "dp", **fields}))
    trainer.run()
    return trainer


def plans(folder: Path) -> list[Path]:
    return sorted(folder.rglob("plan.json"))


def compute_config(folder: Path) -> None:
    assert trained(folder, compute_config=None).world_size == 1
    with pytest.raises(InputError, match="there are 1 ranks"):
        trained(folder, compute_config=ComputeConfig(1, 3, use_end2end=True))


def gen_savedir(folder: Path) -> None:
    trained(folder, gen_savedir=str(folder / "there"))
    assert plans(folder / "there")


def gen_reuse(folder: Path) -> None:
    trained(folder)
    trained(folder, gen_reuse="match")
    changed = ComputeConfig(1, 1, use_end2end=True, user_config={"a": 1})
    with pytest.raises(InputError, match="user_config"):
        trained(folder, gen_reuse="match", compute_config=changed)
    trained(folder, compute_config=changed)


def pas_policy(folder: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'autodist'"):
        trained(folder, pas_policy="autodits")
    with pytest.raises(InputError, match="no strategy file"):
        trained(folder, pas_policy="nowhere.json")


def broadcast_strategy(folder: Path) -> None:
    trained(folder, broadcast_strategy="all")  # without other ranks there is nothing to send


def instance_name(folder: Path) -> None:
    trained(folder, instance_name="mine")
    assert any("mine" in str(path) for path in plans(folder))


def run_mode(folder: Path) -> None:
    trained(folder, run_mode="compile", compute_config=ComputeConfig(2, 4, use_end2end=True), pas_policy="tp")
    assert plans(folder)
    assert not (folder / "checkpoints").exists()
    with pytest.raises(InputError, match="a strategy is for the whole model"):
        trained(folder, run_mode="compile", pas_policy="auto")


def tracing_from_weights(folder: Path) -> None:
    model = Model()
    torch.save({"model": model.state_dict()}, folder / "weights.pt")
    zero = OptimizerConfig(type=torch.optim.SGD, args={"lr": 0.0})
    trainer = trained(folder, tracing_from_weights=str(folder / "weights.pt"), optimizer=zero)
    found = trainer.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="cannot load"):
        trained(folder, tracing_from_weights=str(folder / "nothing.pt"))


def dataloader(folder: Path) -> None:
    shifted = DataloaderConfig(
        train_args={"collate_fn": {"__value_type": "function", "value": "tests.trainer.parts.collated"}}
    )
    one = trained(folder / "a", dataloader=shifted).train_status.train_loss
    two = trained(folder / "b", dataloader=DataloaderConfig(train_args={"collate_fn": collated})).train_status
    assert one == two.train_loss != trained(folder / "c").train_status.train_loss
    with pytest.raises(InputError, match=r"dataloader: DataLoader\(.*failed"):
        trained(folder, dataloader=DataloaderConfig(train_args={"workers": 2}))


def dataset_sampler(folder: Path) -> None:
    ordered = DatasetSamplerConfig(train_args={"shuffle": False, "rank": 7, "num_replicas": 9})
    one = trained(folder / "a", dataset_sampler=ordered).train_status.train_loss
    streamed = DatasetConfig(type=Stream, train_args={"size": 20})
    two = trained(folder / "b", dataset=streamed).train_status.train_loss
    assert one == two != trained(folder / "c").train_status.train_loss


def log(folder: Path) -> None:
    trained(
        folder,
        max_train_steps=2,
        log=[
            LogConfig(type=Lines, args={"path": str(folder / "lines")}),
            LogConfig(type="TensorBoardLogger", args={"name": "run", "root_dir": str(folder / "tb")}),
        ],
    )
    lines = (folder / "lines").read_text().splitlines()
    assert [line.rsplit(" ", 5)[0] for line in lines[:2]] == ["train 1", "train 2"]
    assert lines[2].startswith("val 2 val_loss val_wall")
    assert {path.parent.name for path in (folder / "tb").rglob("events*")} == {"train", "val"}


def precision(folder: Path) -> None:
    trainer = trained(folder / "a", precision="bf16")
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    trainer = trained(folder / "b", precision={"param": "bf16", "buffer": "none"})
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def max_epochs(folder: Path) -> None:
    status = trained(folder, max_epochs=2, max_train_steps=None).train_status
    assert (status.epoch, status.finished_train_steps) == (2, 6)


def max_train_steps(folder: Path) -> None:
    assert trained(folder, max_train_steps=4).train_status.finished_train_steps == 4


def max_val_steps(folder: Path) -> None:
    many = DatasetConfig(type=Dataset, train_args={"size": 20}, val_args={"size": 40, "seed": 1})
    whole = trained(folder / "a", dataset=many).train_status.val_loss
    first = trained(folder / "b", dataset=many, max_val_steps=1).train_status.val_loss
    assert whole != first


def validations(folder: Path, **fields: Any) -> int:
    path = folder / "lines"
    path.unlink(missing_ok=True)
    log_config = [LogConfig(type=Lines, args={"path": str(path)})]
    never = CheckpointConfig(no_save=True)
    trained(folder, log=log_config, max_epochs=2, max_train_steps=None, checkpoint=never, **fields)
    return sum(line.startswith("val") for line in path.read_text().splitlines())


def val_every_n_train_steps(folder: Path) -> None:
    assert validations(folder, val_every_n_train_steps=2, val_every_n_epochs=None) == 3


def val_every_n_epochs(folder: Path) -> None:
    assert validations(folder) == 2
    assert validations(folder, val_every_n_epochs=2) == 1
    assert validations(folder, val_every_n_epochs=None) == 0


def enable_progress_bar(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(folder)
    assert "step 5/5" not in capsys.readouterr().err
    trained(folder / "a", enable_progress_bar=True)
    assert "step 5/5" in capsys.readouterr().err


def log_progress_every_n_train_steps(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atorch_ns")
    trained(folder, log_progress_every_n_train_steps=2)
    lines = [one.getMessage() for one in caplog.records if one.getMessage().startswith("Epoch")]
    assert [line.split(" train_loss=")[0] for line in lines] == [
        "Epoch 0: 2/3",
        "Epoch 0: 3/3",
        "Epoch 1: 1/3",
        "Epoch 1: 2/3",
    ]


def save_strategy_to_file(folder: Path) -> None:
    trained(folder, save_strategy_to_file=str(folder / "strategy.yaml"))
    assert "parallel_mode" in Strategy.load(folder / "strategy.yaml").names


def seed(folder: Path) -> None:
    losses = [trained(folder / str(n), seed=n).train_status.train_loss for n in (1, 2)]
    assert losses[0] != losses[1] == trained(folder / "again", seed=2).train_status.train_loss


def init_env_fn(folder: Path) -> None:
    given = trained(folder / "a", seed=None, init_env_fn=seeded).train_status.train_loss
    named = trained(folder / "b", seed=None, init_env_fn="tests.trainer.parts.seeded").train_status.train_loss
    assert given == named == trained(folder / "c", seed=5).train_status.train_loss


FIELDS = [field.name for field in dataclasses.fields(TrainerArgs)]


@pytest.mark.parametrize(
    "name", [name for name in FIELDS if not any(name in group.split() for group in COVERED)]
)
def test_every_field_counts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    check = globals()[name]
    more = {"capsys": capsys, "caplog": caplog}
    check(tmp_path, **{key: more[key] for key in more if key in check.__annotations__})


def test_weights_and_biases_get_the_settings_and_names_with_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its process, which tests of the tracker start."""
    logged: list[Any] = []

    class Tracker:
        def __init__(self, **settings: Any) -> None:
            logged.append(settings)

        def log(self, metrics: Any, step: int) -> None:
            logged.append((dict(metrics), step))

        def close(self) -> None:
            logged.append("closed")

    monkeypatch.setattr("atorch_ns.trainer.loggers.WandbTracker", Tracker)
    logger = WandbLogger("run", "project")
    logger.setup({"seed": 1})
    logger.log_metrics({"loss": 2.0}, 3, tag="train")
    logger.finalize()
    assert logged[1]["config"] == {"seed": 1}
    assert logged[2:] == [({"train/loss": 2.0}, 3), "closed"]


def test_an_empty_dataset(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to train on"):
        trained(tmp_path, dataset=DatasetConfig(type=Dataset, train_args={"size": 0}))


def test_loss_reduction(tmp_path: Path) -> None:
    summed = OptimizerConfig(type=torch.optim.Adam, args={"lr": 1e-2}, loss_reduction="sum")
    found = run(str(tmp_path), 1, {"pas_policy": "dp", "optimizer": summed})
    counts = [4, 4, 2, 4, 4]
    wanted = [loss * count for loss, count in zip(plain()["losses"], counts, strict=True)]
    assert found["losses"] == pytest.approx(wanted, abs=1e-4)


def validated(folder: str, plan: int) -> float:
    trainer = Trainer(train_args=args_of(folder, plan, pas_policy="tp" if plan > 1 else "dp"))
    trainer.run()
    assert trainer.train_status.val_loss is not None
    return trainer.train_status.val_loss


def test_validation_is_that_of_one_process(tmp_path: Path) -> None:
    model = Model()
    model.load_state_dict(plain()["weights"])
    dataset = Dataset(8, seed=1)
    batches: Any = torch.utils.data.DataLoader(dataset, batch_size=2)  # type: ignore[arg-type]
    wanted = float(torch.stack([model(batch)[0].detach() for batch in batches]).mean())
    for plan in (1, 2):
        for found in run_ranks(validated, 2, args=(str(tmp_path / str(plan)), plan)):
            assert found == pytest.approx(wanted, abs=2e-5)


def searched(folder: str) -> str:
    trainer = Trainer(train_args=args_of(folder, pas_policy="auto", model=ModelConfig(type=Model)))
    trainer.run()
    return str(trainer.result.report.strategy)


def test_a_strategy_that_is_searched_for(tmp_path: Path) -> None:
    first, second = run_ranks(searched, 2, args=(str(tmp_path),), timeout_s=300)
    assert first == second
    assert "parallel_mode" in first


SCRIPT = """
import os
import torch
from atorch_ns.trainer import *

set_default_logger_level('INFO')


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(100, 10)

    def forward(self, data):
        x = self.linear(data['x'])
        return torch.nn.functional.cross_entropy(x, data['y'])


class RandomDataset:
    def __init__(self, split):
        pass

    def __getitem__(self, i):
        return {'x': torch.rand(100), 'y': torch.randint(10, tuple())}

    def __len__(self):
        return 100


if __name__ == '__main__':
    world_size = int(os.getenv('WORLD_SIZE', 1))
    trainer_args = TrainerArgs(
        compute_config=ComputeConfig(plan_ngpus=1, runtime_ngpus=world_size, use_end2end=True),
        model=ModelConfig(type=Model),
        optimizer=OptimizerConfig(type=torch.optim.AdamW),
        dataset=DatasetConfig(type=RandomDataset, train_args={'split': 'train'}),
        max_train_steps=10,
        enable_progress_bar=False,
    )
    trainer = Trainer(train_args=trainer_args)
    trainer.run()
"""


def test_the_quickstart_of_the_specification(tmp_path: Path) -> None:
    """On one process, and then on two in the same folder."""
    (tmp_path / "model.py").write_text(SCRIPT)
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for command, line in (([], "Epoch 0: 010/100 train_loss="), (two, "Epoch 0: 10/50 train_loss=")):
        done = subprocess.run(
            [sys.executable, *command, "model.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert line in done.stderr
        assert "Saving checkpoint to checkpoints/0000-0010" in done.stderr
        assert "Reached max train steps(10): Training is done." in done.stderr


def test_a_yaml_file_on_the_command_line(tmp_path: Path) -> None:
    config = {
        "model": {"type": "tests.trainer.parts.Model"},
        "optimizer": {"type": "torch.optim.Adam", "args": {"lr": 0.01}},
        "dataset": {"type": "tests.trainer.parts.Dataset", "train_args": {"size": 20}},
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "seed": 3,
        "pas_policy": "dp",
        "gen_savedir": str(tmp_path / "plans"),
        "checkpoint": {"save_dir": "$(gen_savedir)/../checkpoints"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = ["-f", str(tmp_path / "config.yaml"), "--max_train_steps", "5"]
    for command in (["-m", "atorch_ns.cli", "train"], ["-m", "atorch_ns.trainer"]):
        done = subprocess.run(
            [sys.executable, *command, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        loss = plain()["losses"][-1]
        assert f"train_loss={loss:.3f}" in done.stderr
    manifest = next((tmp_path / "checkpoints" / "last").resolve().glob("step-5/manifest.json"))
    assert json.loads(manifest.read_text())["extra"]["train_args"]["max_train_steps"] == 5


def test_the_command_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("atorch_ns")
    before = logger.level, list(logger.handlers)
    with pytest.raises(InputError, match="cannot read"):
        train(["-f", str(tmp_path / "missing.yaml")])
    assert (logger.level, list(logger.handlers)) == before
