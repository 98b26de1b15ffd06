"""What cannot be saved or loaded is said, with names, before anything is changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import checkpoint
from atorch_ns.api import auto_accelerate
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.testing.parity import snapshot
from atorch_ns.testing.workers import run_ranks


def build(*, width: int = 4, depth: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).to(dtype)


def make(model: nn.Module | None = None, **arguments: Any) -> Result:
    given: dict[str, Any] = {
        "optim_func": torch.optim.AdamW,
        "dataset": [torch.full((4,), float(number)) for number in range(16)],
        "dataloader_args": {"batch_size": 4},
        "loss_func": lambda batch, output: output.square().mean(),
        "load_strategy": [],
        **arguments,
    }
    _, result, _ = auto_accelerate(build() if model is None else model, **given)
    assert result is not None
    return result


def trained(steps: int = 1, **arguments: Any) -> Result:
    result = make(**arguments)
    assert result.dataloader is not None
    for _, batch in zip(range(steps), result.dataloader, strict=False):
        result.train_step(batch)
    return result


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path, trained(lr_scheduler_cls=torch.optim.lr_scheduler.ExponentialLR, **DECAY))
    return tmp_path


DECAY: dict[str, Any] = {"lr_scheduler_args": {"gamma": 0.9}}
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


class WithBuffer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*build().children())
        self.register_buffer("count", torch.zeros(3))


def frozen() -> nn.Module:
    model = build()
    model.get_parameter("0.weight").requires_grad_(False)
    return model


def test_a_parameter_may_be_frozen_in_one_of_both_jobs(saved: Path, tmp_path: Path) -> None:
    """Also where the optimizer that was saved had no frozen parameters, as a group of the user's."""
    checkpoint.load(saved, make(frozen(), lr_scheduler_cls=torch.optim.lr_scheduler.ExponentialLR, **DECAY))
    trainable = {"optim_param_func": lambda model: [p for p in model.parameters() if p.requires_grad]}
    checkpoint.save(tmp_path / "trainable", trained(model=frozen(), **trainable))
    result = make(frozen())
    checkpoint.load(tmp_path / "trainable", result)
    assert result.train_step.num_steps == 1
    assert result.optim is not None
    assert len(result.optim.state) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": build(depth=3)}, r"2 parameter\(s\) missing in the checkpoint: 2\.bias, 2\.weight"),
        ({"model": build(depth=1)}, r"2 parameter\(s\) that this model does not have: 1\.bias, 1\.weight"),
        (
            {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))},
            r"1\.weight is \(5, 4\) here and \(4, 4\)",
        ),
        ({"model": WithBuffer()}, r"1 buffer\(s\) missing in the checkpoint: count"),
        (
            {"optim_param_func": lambda model: [p for n, p in model.named_parameters() if n != "0.weight"]},
            r"other parameters than .* without 1 that it did: 0\.weight",
        ),
        (
            {"optim_func": torch.optim.Adam},
            r"holds states of torch\.optim\.adamw\.AdamW, .* torch\.optim\.adam\.Adam",
        ),
        ({"lr_scheduler_cls": PLATEAU}, r"state of .*ExponentialLR, but this job has .*ReduceLROnPlateau"),
        ({"dataloader_args": {"batch_size": 8}}, r"batches of 4 samples, .* has 8, .*data_position=False"),
    ],
)
def test_a_job_that_does_not_fit(saved: Path, arguments: dict[str, Any], said: str) -> None:
    result = make(**arguments)
    before = snapshot(result.model)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(saved, result)
    after = snapshot(result.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert result.train_step.num_steps == 0


def test_the_data_can_begin_anew(saved: Path) -> None:
    result = make(dataloader_args={"batch_size": 8})
    checkpoint.load(saved, result, data_position=False)
    assert result.dataloader is not None
    assert result.dataloader.state_dict()["batches"] == 0


def test_what_is_left_out_is_noted(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "atorch_ns"):
        loaded = checkpoint.load(saved, make(optim_func=None, dataset=None, dataloader_args=None))
    assert loaded["notes"] == [
        "its optimizer is not used: this job has none",
        "its lr_scheduler is not used: this job has none",
        "its data position is not used: this job has none",
    ]
    assert "its optimizer is not used" in caplog.text
    checkpoint.save(tmp_path / "bare", make(optim_func=None, dataset=None, dataloader_args=None))
    loaded = checkpoint.load(tmp_path / "bare", trained())
    assert loaded["notes"] == [
        "it holds no optimizer: the one here begins anew",
        "it holds no data position: the one here begins anew",
    ]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _newer(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("manifest.json", _truncate, r"manifest\.json is damaged"),
        ("manifest.json", _newer, r"this version cannot read it: format"),
        ("manifest.json", Path.unlink, r"step-1 is incomplete"),
        (".metadata", _truncate, r"step-1 is damaged: \.metadata has \d+ bytes, and \d+ were written"),
        (
            ".metadata",
            Path.unlink,
            r"step-1 is damaged: \.metadata of \d+ bytes cannot be opened: No such file",
        ),
        (
            "__0_0.distcp",
            Path.unlink,
            r"step-1 is damaged: __0_0\.distcp of \d+ bytes cannot be opened: No such",
        ),
        ("__0_0.distcp", _truncate, r"step-1 is damaged: __0_0\.distcp has \d+ bytes, and \d+ were written"),
    ],
)
def test_a_damaged_checkpoint(saved: Path, name: str, damage: Callable[[Path], None], said: str) -> None:
    damage(saved / "step-1" / name)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(saved / "step-1", make())


def test_a_missing_file_is_named_with_the_size_that_it_had_however_little_of_it_is_read(saved: Path) -> None:
    file = saved / "step-1" / "__0_0.distcp"
    size = file.stat().st_size
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp of {size} bytes cannot be opened"):
        checkpoint.load(saved / "step-1", make(optim_func=None, dataset=None, dataloader_args=None))


class Remembers(torch.optim.SGD):
    """SGD that keeps something more in its state."""

    def __init__(self, params: Any, *, thing: Any, keyed: bool = False, **options: Any) -> None:
        super().__init__(params, lr=0.1, **options)
        self.thing, self.keyed = thing, keyed

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.keyed:
                    self.state["all"] = {"thing": self.thing}  # type: ignore[index]
                else:
                    self.state[parameter]["thing"] = self.thing


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thing": [1, 2]}, r"state of Remembers cannot be saved: its state 'thing' of 0\.weight is a list"),
        ({"thing": 1, "keyed": True}, r"it keeps dict under 'all'"),
    ],
)
def test_an_optimizer_whose_state_has_no_form(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    result = trained(optim_func=Remembers, optim_args=options)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(tmp_path / "new", result)
    assert not (tmp_path / "new").exists()


def test_a_scheduler_whose_state_has_no_form(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.lock = object()
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            return [group["lr"] for group in self.optimizer.param_groups]

    with pytest.raises(CheckpointError, match=r"the scheduler's state\['lock'\] is a builtins.object"):
        checkpoint.save(tmp_path, trained(lr_scheduler_cls=Odd))


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_a_step_is_a_count(tmp_path: Path, step: Any) -> None:
    with pytest.raises(CheckpointError, match=r"step must be a non-negative integer"):
        checkpoint.save(tmp_path, make(), step=step)


def test_a_step_can_be_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make(), step=70)
    assert checkpoint.load(tmp_path / "step-70", result := make())["step"] == 70
    assert result.train_step.num_steps == 70


def test_extra_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra\['a'\] is .* a set; JSON cannot hold it"):
        checkpoint.save(tmp_path, make(), extra={"a": {1}})  # type: ignore[dict-item]


class Counts(torch.optim.SGD):
    """SGD whose state has numbers, a text and a tensor that is not shaped like the parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["ratio"], state["mode"], state["none"] = float("inf"), "fast", None
                state.setdefault("rows", torch.arange(float(parameter.shape[0]))).add_(1)


def test_states_of_other_kinds_carry_over(tmp_path: Path) -> None:
    """Each rank of zero1 holds some of them."""

    def save() -> None:
        checkpoint.save(tmp_path, trained(2, optim_func=Counts, load_strategy=["zero1"]))

    run_ranks(save, 2)
    result = trained(1, optim_func=Counts)
    checkpoint.load(tmp_path, result)
    assert result.optim is not None
    states = list(result.optim.state.values())
    assert len(states) == 4
    for state in states:
        assert {name: state[name] for name in ("count", "ratio", "mode", "none")} == {
            "count": 2,
            "ratio": float("inf"),
            "mode": "fast",
            "none": None,
        }
        assert state["rows"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_states_that_nobody_has_yet_are_cleared(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make())
    result = trained(2)
    assert result.optim is not None
    assert len(result.optim.state) == 4
    checkpoint.load(tmp_path, result)
    assert len(result.optim.state) == 0


class Remote(nn.Linear):
    """A module with a state of its own."""

    def __init__(self, tensor: bool) -> None:
        super().__init__(4, 4)
        self.calls, self.tensor = 0, tensor

    def get_extra_state(self) -> Any:
        return torch.tensor([self.calls]) if self.tensor else {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state)


def test_extra_states_of_modules(tmp_path: Path) -> None:
    remote, fresh = Remote(True), Remote(True)
    remote.calls = 7
    checkpoint.save(tmp_path, make(nn.Sequential(remote)))
    checkpoint.load(tmp_path, make(nn.Sequential(fresh)))
    assert fresh.calls == 7
    with pytest.raises(CheckpointError, match="Remote at 0 has an extra state of type dict"):
        checkpoint.save(tmp_path, make(nn.Sequential(Remote(False))))


def test_buffers(tmp_path: Path) -> None:
    model = WithBuffer()
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model.get_buffer("count").fill_(5)
    checkpoint.save(tmp_path, make(model))
    fresh = WithBuffer()
    checkpoint.load(tmp_path, make(fresh))
    assert fresh.get_buffer("count").tolist() == [5, 5, 5]
