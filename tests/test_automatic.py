"""auto_accelerate without a strategy: it finds one, changes nothing else, and says why."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns import Strategy, auto_accelerate
from atorch_ns.errors import InputError, RankError, SearchError
from atorch_ns.report import TrainingReport
from atorch_ns.report.info.verdict import verdict
from atorch_ns.search import read_history
from atorch_ns.testing.models import SyntheticDataset, get_case
from atorch_ns.testing.parity import (
    Trajectory,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
    snapshot,
)
from atorch_ns.testing.workers import catch_ranks, run_ranks

pytestmark = pytest.mark.timeout(240)

# fp32 and nothing compiled: what is found can be held against one process to the last digits, in seconds.
FP32 = ["precision", "compile"]


def _search(**changes: Any) -> dict[str, Any]:
    case = get_case("tied_llama")
    return {
        "optim_func": torch.optim.AdamW,
        "optim_args": {"lr": 1e-3},
        "dataset": SyntheticDataset(case, 40),
        "dataloader_args": {"batch_size": 8},
        "loss_func": case.loss_func,
        "model_input_format": case.model_input_format,
        "excluded": FP32,
        "search": {"max_trials": 3, "time_limit_s": 120},
        **changes,
    }


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = get_case("tied_llama").build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states, threads, environment = _states(), threading.active_count(), dict(os.environ)
    path = tmp_path / "strategy.json"
    status, result, strategy = auto_accelerate(model, **_search(save_strategy_to_file=path))
    assert status
    assert result is not None
    assert _states() == states
    assert threading.active_count() == threads
    assert dict(os.environ) == environment
    assert not list(tmp_path.glob("atorch_ns_trials_*"))
    assert all(torch.equal(value, weights[name]) for name, value in snapshot(result.model).items())
    found = result.report.search
    assert found is not None
    assert found.winner is not None
    assert found.winner.trial is not None
    assert found.single_process is None
    assert found.baseline is not None
    assert found.baseline.trial is not None, "the plain strategy is always tried"
    assert 1 <= found.num_trials <= 3
    assert any(check.startswith("numerics against one process, with SGD: passed") for check in found.checks)
    assert not [check for check in found.checks if "failed" in check]
    saved = Strategy.load(path)
    assert saved == strategy
    assert saved.provenance["measured"]["step_seconds"] > 0  # type: ignore[index, call-overload]
    batch = next(iter(result.dataloader))  # type: ignore[arg-type]
    for _ in range(8):
        result.train_step(batch)
    assert result.report.actual is not None
    assert len(result.report.actual.step_seconds) == 6, "all but the first two"
    result.report.save(tmp_path / "report.json")
    result.report.save(tmp_path / "report.html")
    assert TrainingReport.load(tmp_path / "report.json").search == found
    assert "<svg" in (tmp_path / "report.html").read_text()


def _train_automatically() -> tuple[Trajectory, str, str]:
    case = get_case("tied_llama")
    arguments = _search(optim_args={"lr": 1e-3, "eps": 5e-3, "weight_decay": 0.1})
    _, result, strategy = auto_accelerate(case.build(), **arguments)
    assert result is not None
    assert result.report.search is not None
    single = result.report.search.single_process
    assert single is not None
    assert single.trial.succeeded, single.trial.reason
    said = "Use one process: it takes" if single.is_as_fast else "One process takes"
    assert any(sentence.startswith(said) for sentence in verdict(result.report.search))
    initial = snapshot(result.model)
    losses = [float(result.train_step(batch)) for batch in result.dataloader]  # type: ignore[union-attr]
    trajectory = Trajectory(losses=losses, initial=initial, final=snapshot(result.model))
    return trajectory, str(strategy), json.dumps(result.report.search.checks)


def test_two_ranks_train_with_what_they_found_as_one_process_does() -> None:
    get_case("tied_llama").build()
    ranks = run_ranks(_train_automatically, 2, timeout_s=200)
    assert ranks[0][1:] == ranks[1][1:]
    assert_ranks_agree([rank[0] for rank in ranks])
    reference = reference_run(
        get_case("tied_llama"), optim_args={"lr": 1e-3, "eps": 5e-3, "weight_decay": 0.1}
    )
    assert_parity(compare(reference, ranks[0][0]))


def test_wishes_are_kept() -> None:
    wanted = [("checkpoint", {"every_n": 2})]
    _, result, strategy = auto_accelerate(
        get_case("tied_llama").build(), **_search(included=wanted, search={"max_trials": 1})
    )
    assert result is not None
    assert strategy is not None
    assert strategy["checkpoint"] == {"every_n": 2}
    names = {name for row in result.report.search.rows for name, _ in row.candidate.steps}  # type: ignore[union-attr]
    assert not names & {"amp_native", "half", "compile"}


def test_blocks_are_timed_once_and_read_from_the_database(tmp_path: Path) -> None:
    database = tmp_path / "profiles.json"
    arguments = _search(search={"max_trials": 1, "profile_database": str(database)})
    _, first, _ = auto_accelerate(get_case("tied_llama").build(), **arguments)
    kept = database.read_bytes()
    _, again, _ = auto_accelerate(get_case("tied_llama").build(), **arguments)
    assert database.read_bytes() == kept, "nothing is measured twice"
    for result in (first, again):
        assert result is not None
        notes = result.report.search.setting.notes  # type: ignore[union-attr]
        assert any("block times were measured" in note for note in notes), notes


def test_the_callers_accumulation_is_part_of_every_candidate() -> None:
    _, result, strategy = auto_accelerate(
        get_case("tied_llama").build(), **_search(gradient_accumulation_steps=4, search={"max_trials": 1})
    )
    assert result is not None
    assert strategy is not None
    assert strategy["gradient_accumulation"] == {"num_micro_batches": 4}
    assert result.job.step.num_micro_batches == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"excluded": ["fsdpp"]}, "fsdp"),
        ({"included": ["chekpoint"]}, "checkpoint"),
        ({"search": {"max_trial": 1}}, "max_trial"),
        ({"search": {"objective": "speed"}}, "objective"),
        ({"time_limit": -1}, "time_limit must be a positive number"),
        ({"time_limit": "x"}, "time_limit must be a positive number"),
        ({"search": 5}, "search must be a dictionary"),
        ({"excluded": 5}, "excluded must be a list"),
        ({"included": {"fsdp": 1}}, "included must be a list"),
        (
            {"search_history": 5, "search_calibration": 3},
            "search_history must be a path.*\nsearch_calibration",
        ),
        ({"save_strategy_to_file": 5}, "save_strategy_to_file must be a path"),
        ({"batch_size": "4"}, "batch_size must be a positive integer"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"verbose": "z"}, "verbose must be True or False"),
        ({"sample_batch": 5}, "no tensor"),
        ({"finetune_strategy": True}, "load_strategy"),
        ({"loss_func": None}, "loss_func"),
        ({"dataset": None, "dataloader_args": None}, "sample_batch"),
    ],
    ids=str,
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        auto_accelerate(get_case("tied_llama").build(), **_search(**changes))


def test_a_model_that_learns_nothing_is_refused_before_any_trial() -> None:
    model = get_case("tied_llama").build().requires_grad_(False)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        auto_accelerate(model, **_search())


def _one_rank_is_killed(victim: int) -> float:
    import signal
    import time

    import torch.distributed as dist

    if dist.get_rank() == victim:
        threading.Timer(20.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        auto_accelerate(
            get_case("tied_llama").build(), **_search(search={"sampler": "exhaustive", "max_trials": 500})
        )
    assert victim in caught.value.failures, caught.value
    return time.monotonic() - begun - 20.0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_in_time(victim: int) -> None:
    outcomes = catch_ranks(_one_rank_is_killed, 2, args=(victim,), timeout_s=120)
    assert outcomes[victim].status == "died"
    survivor = outcomes[1 - victim]
    assert survivor.status == "returned", survivor.describe()
    assert survivor.value is not None
    assert survivor.value < 25, "ten seconds of silence, and a busy machine"


def _search_until_killed(history: Path, victim: int, seconds: float) -> None:
    import signal

    import torch.distributed as dist

    if dist.get_rank() == victim:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(RankError):
        auto_accelerate(
            get_case("tied_llama").build(),
            **_search(search={"sampler": "exhaustive", "max_trials": 500}, search_history=history),
        )


@pytest.mark.slow
def test_no_trial_of_a_killed_search_is_run_again(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    moments = random.Random(7)
    tried: list[str] = []
    for victim in (0, 1, 1, 0):
        catch_ranks(_search_until_killed, 2, args=(history, victim, moments.uniform(16, 24)), timeout_s=120)
        (study,) = read_history(history)
        keys = [trial.key for trial in study.trials]
        assert keys[: len(tried)] == tried
        assert len(keys) > len(tried)
        assert len(set(keys)) == len(keys), "each strategy once"
        tried = keys


def _typo() -> None:
    auto_accelerate(get_case("tied_llama").build(), **_search(excluded=["fsdpp"]))


def test_a_typo_is_an_error_on_every_rank() -> None:
    outcomes = catch_ranks(_typo, 2, timeout_s=60)
    assert [type(outcome.error) for outcome in outcomes] == [InputError, InputError]


def test_nothing_fits() -> None:
    settings = {"memory_limit_gib": 1e-4, "max_trials": 2}
    with pytest.raises(SearchError, match=r"more|over|try") as caught:
        auto_accelerate(get_case("tied_llama").build(), **_search(search=settings))
    outcome = caught.value.outcome
    assert outcome.best is None  # type: ignore[attr-defined]
    assert outcome.nearest_miss  # type: ignore[attr-defined]
    assert auto_accelerate(
        get_case("tied_llama").build(), **_search(search=settings, raise_errors=False)
    ) == (False, None, None)


class _Broken(Exception):
    """What a user's loss raises."""


def _raising_loss(batch: Any, output: Any) -> torch.Tensor:
    if not isinstance(output, torch._subclasses.FakeTensor):
        raise _Broken("the labels are missing")
    loss: torch.Tensor = output.float().square().mean()
    return loss


def test_every_trial_fails_for_the_users_reason() -> None:
    with pytest.raises(SearchError, match="the labels are missing"):
        auto_accelerate(
            get_case("tied_llama").build(), **_search(loss_func=_raising_loss, search={"max_trials": 2})
        )


def test_a_search_that_ended_is_confirmed_by_one_trial(tmp_path: Path) -> None:
    history = tmp_path / "history.log"
    arguments = _search(search_history=history)
    _, first, _ = auto_accelerate(get_case("tied_llama").build(), **arguments)
    _, again, _ = auto_accelerate(get_case("tied_llama").build(), **arguments)
    assert first is not None
    assert again is not None
    before, after = first.report.search, again.report.search
    assert before is not None
    assert after is not None
    assert before.setting.fingerprint == after.setting.fingerprint
    tried = [row.candidate.key for row in sorted(after.rows, key=lambda row: row.trial_number) if row.trial]
    assert tried[0] == before.best


def test_a_standalone_engine_runs_the_search_and_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atorch_ns.engine.coordinator.jobs import EngineJobs
    from atorch_ns.engine.rpc.auth import new_token
    from atorch_ns.engine.rpc.server import CoordinatorServer

    token = new_token()
    with CoordinatorServer(EngineJobs(tmp_path), token=token) as server:
        arguments = _search(search_engine=server.address)
        with pytest.raises(InputError, match="ATORCH_NS_ENGINE_TOKEN"):
            auto_accelerate(get_case("tied_llama").build(), **arguments)
        monkeypatch.setenv("ATORCH_NS_ENGINE_TOKEN", token)
        _, first, _ = auto_accelerate(get_case("tied_llama").build(), **arguments)
        _, again, _ = auto_accelerate(get_case("tied_llama").build(), **arguments)
    assert first is not None
    assert again is not None
    before, after = first.report.search, again.report.search
    assert before is not None
    assert after is not None
    tried = [row.candidate.key for row in sorted(after.rows, key=lambda row: row.trial_number) if row.trial]
    assert tried[0] == before.best


def test_a_model_that_cannot_be_sent_is_tried_in_this_process() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = get_case("tied_llama").build()
            self.lock = threading.Lock()

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.inner(tokens)

    model = Locked()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    _, result, _ = auto_accelerate(model, **_search(search={"max_trials": 2}))
    assert result is not None
    assert all(torch.equal(value, weights[name]) for name, value in snapshot(result.model).items())


def test_finetuning_keeps_the_methods() -> None:
    _, result, strategy = auto_accelerate(
        get_case("tied_llama").build(),
        **_search(load_strategy=["checkpoint"], finetune_strategy=True, excluded=None),
    )
    assert result is not None
    assert strategy is not None
    assert "checkpoint" in strategy
    assert len(result.report.search.rows) >= 2  # type: ignore[union-attr]


def _on_rank_one_the_data_is_broken() -> None:
    import torch.distributed as dist

    dataset: Any = SyntheticDataset(get_case("tied_llama"), 40)
    if dist.get_rank() == 1:
        dataset = [None]
    auto_accelerate(get_case("tied_llama").build(), **_search(dataset=dataset))


def test_one_rank_cannot_sample_its_data() -> None:
    outcomes = catch_ranks(_on_rank_one_the_data_is_broken, 2, timeout_s=60)
    assert all(isinstance(outcome.error, (InputError, RankError)) for outcome in outcomes), outcomes
