"""What a search leaves behind: the logs that its report names, where a user looks for them, and nothing else."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from atorch_ns import auto_accelerate
from atorch_ns.engine.trial.worker import log_folder, new_log_folder
from atorch_ns.errors import SearchError
from atorch_ns.search import SearchOutcome
from atorch_ns.testing.models import SyntheticDataset, get_case
from atorch_ns.testing.workers import run_ranks

pytestmark = pytest.mark.timeout(120)


class _Broken(Exception):
    """What a user's loss raises."""


def _raising_loss(batch: Any, output: Any) -> torch.Tensor:
    if not isinstance(output, torch._subclasses.FakeTensor):
        raise _Broken("the labels are missing")
    loss: torch.Tensor = output.float().square().mean()
    return loss


def _search(**changes: Any) -> SearchOutcome:
    """A search with one trial; its outcome even if nothing could be run."""
    case = get_case("mlp")
    arguments: dict[str, Any] = {
        "optim_func": torch.optim.SGD,
        "optim_args": {"lr": 1e-3},
        "dataset": SyntheticDataset(case, 16),
        "dataloader_args": {"batch_size": 8},
        "loss_func": case.loss_func,
        "model_input_format": case.model_input_format,
        "excluded": ["precision", "compile"],
        "search": {"max_trials": 1, "probe": False},
        **changes,
    }
    try:
        _, result, _ = auto_accelerate(case.build(), **arguments)
    except SearchError as error:
        return cast("SearchOutcome", error.outcome)
    assert result is not None
    assert result.report.search is not None
    return result.report.search


def _logs(outcome: SearchOutcome) -> list[Path]:
    return [Path(row.trial.log) for row in outcome.rows if row.trial is not None and row.trial.log]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("atorch_ns"))


# ---- whole searches


def test_a_search_without_a_failure_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    outcome = _search(save_strategy_to_file=tmp_path / "strategy.json", search_history=tmp_path / "h.journal")
    assert outcome.best is not None
    assert _logs(outcome) == []
    assert _left(temporary) == []
    assert not list(tmp_path.glob("*.logs"))


def _failing_search(folder: Path) -> tuple[list[str], str]:
    tempfile.tempdir = str(folder / "temporary")
    outcome = _search(loss_func=_raising_loss, save_strategy_to_file=folder / "strategy.json")
    return [str(log) for log in _logs(outcome)], outcome.nearest_miss


def test_what_the_report_names_is_there_beside_what_was_saved(tmp_path: Path, temporary: Path) -> None:
    (logs, miss), (others, _) = run_ranks(_failing_search, 2, args=(tmp_path,), timeout_s=100)
    assert logs == others
    (log,) = map(Path, logs)
    assert log.parent == tmp_path / "strategy.logs"
    assert "the labels are missing" in log.read_text()
    assert all(re.fullmatch(r"trial-\d+-0-rank[01].log", path.name) for path in log.parent.iterdir())
    assert miss.endswith(f"Log: {log}")
    assert _left(temporary) == []


# ---- the folder


def test_a_place_that_cannot_be_made_is_told_and_replaced(tmp_path: Path, temporary: Path) -> None:
    place = tmp_path / "nosuch" / "logs"
    folder, problem = new_log_folder(place)
    assert folder.parent == temporary
    assert f"cannot be kept in {place}" in problem
    assert str(folder) in problem
    with log_folder(place) as own:
        assert own.parent == temporary
    assert not own.exists()
    folder, problem = new_log_folder(None)
    assert (folder.parent, problem) == (temporary, "")


def test_every_search_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [new_log_folder(tmp_path / "strategy.logs")[0] for _ in range(3)]
    assert [folder.name for folder in folders] == ["strategy.logs", "strategy.logs-2", "strategy.logs-3"]


def test_only_the_last_to_leave_removes_it_and_only_if_it_is_empty(tmp_path: Path) -> None:
    folder, problem = new_log_folder(tmp_path / "logs")
    assert problem == ""
    with log_folder(folder):
        with log_folder(folder) as same:
            (same / "worker-rank0.log").write_text("a warning")
        assert folder.exists()
        (same / "worker-rank0.log").unlink()
        (same / "worker-rank1.log").touch()  # of a rank that was killed
    assert not folder.exists()
    folder, _ = new_log_folder(tmp_path / "logs")
    with log_folder(folder):
        (folder / "trial-1-0-rank0.log").write_text("Traceback")
    assert (folder / "trial-1-0-rank0.log").exists()
