"""Checkpoints of the alternative backends: into ddp and back, and weights in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from atorch_ns import checkpoint
from atorch_ns.cluster import Cluster
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import (
    Trajectory,
    accelerate_case,
    assert_parity,
    assert_ranks_agree,
    compare,
    snapshot,
)
from atorch_ns.testing.workers import run_ranks
from opt_lib import _fairscale as fairscale
from opt_lib._deepspeed import zero
from tests.opt_lib.scenarios import backward, error_of, two_groups

CLUSTER = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*left out.*")


def _needs(problems: list[Any]) -> Any:
    return pytest.mark.skipif(bool(problems), reason="; ".join(map(str, problems)))


_DEEPSPEED = _needs(zero.check("zero1", CLUSTER))
_FAIRSCALE = _needs(fairscale.check("zero1", CLUSTER))
BACKENDS = [
    pytest.param([("fsdp", {"atorch_ignored_cls": "norm"})], id="fsdp"),
    pytest.param([("zero1", {"use_ds_zero": True})], id="deepspeed1", marks=_DEEPSPEED),
    pytest.param([("zero2", {"use_ds_zero": True})], id="deepspeed2", marks=_DEEPSPEED),
    pytest.param([("zero1", {"backend": "fairscale"})], id="fairscale1", marks=_FAIRSCALE),
    pytest.param([("zero2", {"not_use_fsdp": True})], id="fairscale2", marks=_FAIRSCALE),
]
STEPS, SAVED_AT = 5, 2


def _accelerated(strategy: list[Any], **arguments: Any) -> Result:
    return accelerate_case(get_case("tied_llama"), strategy, steps=STEPS, **arguments)


def _train(result: Result, steps: int) -> list[float]:
    assert result.dataloader is not None
    losses: list[float] = []
    for batch in result.dataloader:
        losses.append(float(result.train_step(batch)))
        if len(losses) == steps:
            break
    return losses


def _whole_run(strategy: list[Any]) -> Trajectory:
    result = _accelerated(strategy)
    initial = snapshot(result.model)
    return Trajectory(losses=_train(result, STEPS), initial=initial, final=snapshot(result.model))


def _two_halves(before: list[Any], after: list[Any], folder: Path) -> Trajectory:
    first = _accelerated(before)
    initial = snapshot(first.model)
    losses = _train(first, SAVED_AT)
    checkpoint.save(folder, first)
    second = _accelerated(after)
    assert checkpoint.load(folder, second)["step"] == SAVED_AT
    losses += _train(second, STEPS - SAVED_AT)
    return Trajectory(losses=losses, initial=initial, final=snapshot(second.model))


def _there_and_back(strategy: list[Any], folder: Path) -> dict[str, Trajectory]:
    pairs = {"into ddp": (strategy, ["ddp"]), "from ddp": (["ddp"], strategy), "itself": (strategy, strategy)}
    return {name: _two_halves(*pair, folder / name) for name, pair in pairs.items()}


@pytest.fixture(scope="module")
def alone() -> Trajectory:
    return _whole_run([])


@pytest.mark.parametrize("strategy", BACKENDS)
def test_training_goes_on_under_another_strategy(
    strategy: list[Any], alone: Trajectory, tmp_path: Path
) -> None:
    runs = run_ranks(_there_and_back, 2, args=(strategy, tmp_path))
    for name in runs[0]:
        assert_ranks_agree([run[name] for run in runs])
        assert_parity(compare(alone, runs[0][name]))


def _on_four(folder: Path) -> Trajectory:
    mesh = ("parallel_mode", ([("zero", 2), ("data", 2)], None))
    return _two_halves(["fsdp", mesh], ["zero2"], folder)


def test_hybrid_shards_are_written_once_and_read_by_others(alone: Trajectory, tmp_path: Path) -> None:
    runs = run_ranks(_on_four, 4, args=(tmp_path,))
    assert_ranks_agree(runs)
    assert_parity(compare(alone, runs[0]))


def _weights(strategy: list[Any]) -> tuple[dict[str, torch.Tensor], bool, bool]:
    """Weights given to the job, as they come out again; whether the model has them; and whether training keeps them."""
    case = get_case("mlp")
    result = accelerate_case(case, strategy)
    backward(result)
    assert result.optim is not None
    result.optim.step()
    given = {name: value + 1.0 for name, value in case.build().state_dict().items()}
    checkpoint.import_state_dict(result, given)
    seen = _same(snapshot(result.model), given)
    backward(result)
    for group in result.optim.param_groups:
        group["lr"] = 0.0
    result.optim.step()
    return checkpoint.export_state_dict(result), seen, _same(snapshot(result.model), given)


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("strategy", BACKENDS)
def test_weights_go_in_and_come_out(strategy: list[Any]) -> None:
    (exported, *kept), (nothing, *also_kept) = run_ranks(_weights, 2, args=(strategy,))
    expected = {name: value + 1.0 for name, value in get_case("mlp").build().state_dict().items()}
    assert exported.keys() == expected.keys()
    assert _same(exported, expected)
    assert nothing == {}
    assert [*kept, *also_kept] == [True] * 4


class _CountsPerParameter(torch.optim.SGD):
    """Keeps the number of steps of each parameter, and elements in bf16."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("trace", torch.zeros_like(parameter, dtype=torch.bfloat16)).add_(1)
        return super().step(closure)


def _own_state(strategy: list[Any], folder: Path) -> list[Any]:
    arguments = {"optim_func": _CountsPerParameter, "optim_args": {"lr": 0.1}, "optim_param_func": two_groups}
    first = _accelerated(strategy, **arguments)
    _train(first, SAVED_AT)
    checkpoint.save(folder, first)
    second = _accelerated(strategy, **arguments)
    checkpoint.load(folder, second)
    states = second.job.make_states(second.job, second.optim).optimizer_states()
    counts = {entry["count"] for entry in states.values.values()}
    traces = [entry["trace"] for entry in states.tensors.values()]
    # Parameters of ignored modules are not divided.
    full = [trace.full_tensor() if isinstance(trace, DTensor) else trace for trace in traces]
    return [counts, {trace.dtype for trace in traces}, all(bool((trace == SAVED_AT).all()) for trace in full)]


@pytest.mark.parametrize("strategy", BACKENDS[:2])
def test_states_of_ones_own_are_kept(strategy: list[Any], tmp_path: Path) -> None:
    for counts, dtypes, right in run_ranks(_own_state, 2, args=(strategy, tmp_path)):
        assert counts == {SAVED_AT}
        assert dtypes == {torch.bfloat16}
        assert right


def _different_counts(folder: Path) -> str:
    first = _accelerated(["ddp"])
    _train(first, SAVED_AT)
    assert first.optim is not None
    next(iter(first.optim.state.values()))["step"].add_(7)
    checkpoint.save(folder, first)
    second = _accelerated([("zero1", {"use_ds_zero": True})])
    return error_of(lambda: checkpoint.load(folder, second), CheckpointError)


@_DEEPSPEED
def test_flat_pieces_cannot_take_different_counts(tmp_path: Path) -> None:
    for message in run_ranks(_different_counts, 2, args=(tmp_path,)):
        assert "different 'step'" in message
