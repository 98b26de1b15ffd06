"""Front ends save and load the same checkpoints and strategy files: trained by one, resumed by any, as if it had never stopped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from atorch_ns import ComputeConfig, auto_accelerate, checkpoint, parallelize
from atorch_ns.checkpoint import latest
from atorch_ns.checkpoint.one_file import merge
from atorch_ns.errors import InputError
from atorch_ns.merak.checkpoints import position, position_at
from atorch_ns.strategy import Strategy
from atorch_ns.testing.workers import run_ranks
from tests.checkpoint.front_ends import ADAMW, FRONT_ENDS, SAVED_AT, STEPS, batch_of, model

Saved = tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]
"""Weights, and the optimizer's states by parameter and entry."""
METHODS = {
    "auto_accelerate": "fsdp",
    "parallelize": "operator_parallel",
    "Trainer": "ddp",
    "MerakTrainer": "pipeline_parallel",
}
"""What divides the model, or the samples, in the strategy that each saves."""


def _each(names: list[str], runs: list[tuple[Path, int, Path | None, Path | None]]) -> list[Any]:
    """Runs, one after the other: its folder, its last step, what it begins with and its strategy file; the methods of each."""
    found = []
    for name, (folder, steps, begin, strategy) in zip(names, runs, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        given = {} if strategy is None else {"strategy": strategy}
        found.append(FRONT_ENDS[name](folder, steps, begin, **given).strategy.names)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each front end, with its checkpoint and its strategy."""
    parent = tmp_path_factory.mktemp("saved")
    runs = [(parent / name, SAVED_AT, None, None) for name in FRONT_ENDS]
    run_ranks(_each, 2, args=([*FRONT_ENDS], runs), timeout_s=110)
    return parent


def one_process(steps: int) -> Saved:
    """The same steps by hand in one process, without a stop."""
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(steps):
        plain(**batch_of(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    states = {name: optimizer.state[parameter] for name, parameter in plain.named_parameters()}
    return dict(plain.named_parameters()), states


def check(folder: Path, steps: int) -> None:
    """Holds what a run has saved at its end against one process; each state on the scale of its tensor."""
    place = latest(folder)
    assert place is not None
    assert place.name == f"step-{steps}"
    merge(place, folder / "merged.pt")
    tensors = torch.load(folder / "merged.pt", weights_only=False)["tensors"]
    weights, states = one_process(steps)
    for name, weight in weights.items():
        torch.testing.assert_close(tensors[f"model.{name}"], weight.detach(), rtol=1e-4, atol=1e-4, msg=name)
        for entry, value in states[name].items():
            error = (tensors[f"optim.state.{name}.{entry}"] - value).abs().max()
            assert error <= 1e-4 * value.abs().max(), (name, entry)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("resumes", FRONT_ENDS)
def test_each_goes_on_from_what_any_has_saved(resumes: str, saved: Path, tmp_path: Path) -> None:
    runs = [(tmp_path / name, STEPS, saved / name, None) for name in FRONT_ENDS]
    run_ranks(_each, 2, args=([resumes] * len(runs), runs), timeout_s=180)
    for folder, *_ in runs:
        check(folder, STEPS)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "trains",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("auto_accelerate", "Trainer") else [])
        for name in FRONT_ENDS
    ],
)
def test_each_trains_by_the_strategy_file_of_any(trains: str, saved: Path, tmp_path: Path) -> None:
    runs = [(tmp_path / name, SAVED_AT, None, saved / name / "strategy.json") for name in FRONT_ENDS]
    found = run_ranks(_each, 2, args=([trains] * len(runs), runs), timeout_s=180)[0]
    for (name, method), (folder, *_), names in zip(METHODS.items(), runs, found, strict=True):
        assert method in Strategy.load(saved / name / "strategy.json").names
        assert method in names
        check(folder, SAVED_AT)


def test_positions_in_other_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of transformers' Trainer, which counts steps alone; the second epoch is 8 samples old, of 24."""
    save = functools.partial(_saved_by_hand, tmp_path)
    run_ranks(save, 1, args=({"epoch": 1, "batches": 2, "global_batch_size": 4},))
    assert position(str(tmp_path), 6, 4) == (8, 1, 2)
    assert position(str(tmp_path), 3, 8) == (8, 1, 1)
    assert not caplog.records
    assert position(str(tmp_path), 4, 6) == (8, 1, 1)
    assert "2 samples are repeated" in caplog.text
    run_ranks(save, 1, args=(None,))
    assert position(str(tmp_path), 6, 4) == (8, 1, 2)
    assert position_at(1 + 2 / 6, 6, 4) == {"epoch": 1, "batches": 2, "global_batch_size": 4}
    assert position_at(2.0, 3, 8) == {"epoch": 2, "batches": 0, "global_batch_size": 8}


def _saved_by_hand(folder: Path, where: dict[str, int] | None) -> None:
    _, result, _ = auto_accelerate(torch.nn.Linear(2, 2), load_strategy=[], verbose=False)
    assert result is not None
    checkpoint.save(folder, result, step=8, position=where)


def _misfits(folder: Path) -> list[str]:
    found = []
    for axis in ("data", "pipeline"):
        file = folder / f"{axis}.json"
        Strategy([("parallel_mode", ([(axis, 2)], None))]).save(file)
        try:
            parallelize(model(), batch_of(0), str(file), ComputeConfig(2, 2), gen_savedir=str(folder / axis))
        except InputError as error:
            found.append(str(error))
    return found


def test_a_strategy_file_that_parallelize_refuses(tmp_path: Path) -> None:
    degree, staged = run_ranks(_misfits, 2, args=(tmp_path,))[0]
    assert "divides a module over 1 rank(s), but plan_ngpus is 2" in degree
    assert "set use_end2end=True" in staged
