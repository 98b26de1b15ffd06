"""Ranks that divide one model and are given different samples end with an error, and so do copies of weights that differ."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from atorch_ns import ComputeConfig, auto_accelerate, checkpoint, parallelize
from atorch_ns.cluster import Mesh
from atorch_ns.errors import InputError, RankError, StepError
from atorch_ns.job import SameBatch, agreement, same_place
from atorch_ns.job.agreement import SameWeights
from atorch_ns.testing.workers import catch_ranks, run_ranks


class Net(nn.Module):
    """Two layers; takes the targets too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x)
        return out

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def _refusal(step: Callable[[], Any]) -> str:
    try:
        step()
    except InputError as error:
        return str(error)
    return ""


def _trained(axes: list[tuple[str, int]], seed: int, targets_seed: int) -> tuple[str, str]:
    """What a step by ``train_step`` refuses, and one of a loop of one's own, with this rank's samples."""
    torch.manual_seed(0)
    model = Net()
    data = [torch.randn(16, 8, generator=torch.Generator().manual_seed(one)) for one in (seed, targets_seed)]
    status, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        TensorDataset(*data),
        lambda batch, output: nn.functional.mse_loss(output, batch[1]),
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8},
        model_input_format="unpack_sequence",
        load_strategy=[("parallel_mode", (axes, None))],
    )
    assert status
    batch = next(iter(result.dataloader))
    loop = "" if axes[0][0] == "pipeline" else _refusal(lambda: result.model(batch[0]))
    with torch.no_grad():  # validation first, on data that are equal
        result.train_step.evaluate([torch.zeros(8, 8), torch.zeros(8, 8)])
    return _refusal(lambda: result.train_step(batch)), loop


def _cases(folder: Path) -> dict[str, tuple[str, str]]:
    rank = dist.get_rank()
    found = {
        "equal": _trained([("tensor", 2)], 1, 2),
        "data": _trained([("data", 2)], rank, rank),
        "pipeline": _trained([("pipeline", 2)], rank, 2),
        "tensor": _trained([("tensor", 2)], rank, 2),
        "targets": _trained([("tensor", 2)], 1, rank),
    }
    made = _parallelized(rank, folder)
    return {**found, "a module": (made, "")}


def _parallelized(seed: int, folder: Path) -> str:
    torch.manual_seed(0)
    sample = {"x": torch.randn(4, 8)}
    module = parallelize(
        Net(), sample, "autodist", ComputeConfig(plan_ngpus=2, runtime_ngpus=2), gen_savedir=folder
    )
    torch.manual_seed(seed)
    return _refusal(lambda: module(x=torch.randn(4, 8)))


def test_different_samples_of_ranks_that_divide_a_model_end_on_each_of_them(tmp_path: Path) -> None:
    first, second = run_ranks(_cases, 2, args=(tmp_path,))
    assert first == second
    assert first["equal"] == first["data"] == ("", "")
    assert "batch[0] differ" in first["tensor"][1]
    assert first["targets"][1] == ""
    assert "batch[1] differ" in first["targets"][0]
    for name in ("pipeline", "tensor", "a module"):
        assert "ranks 0 and 1 divide one model" in first[name][0]
        assert "torch.manual_seed" in first[name][0]
    assert "batch['x']" in first["a module"][0]


def _compared() -> dict[str, str]:
    rank = dist.get_rank()
    mesh = Mesh([("tensor", 2)], device_type="cpu")
    tokens = torch.arange(100_000)
    given = {
        "rounding": [torch.ones(10) * (1.0 + 1e-3 * rank), torch.tensor(float("nan"))],
        "one token": {"ids": torch.tensor([1, 2, 3 + rank])},
        "order": {"ids": tokens if rank == 0 else tokens.flip(0)},
        "shape": [torch.zeros(2 + rank)],
        "flag": {"causal": rank == 0},
        "kinds": [
            torch.zeros(2, dtype=torch.complex64),
            torch.zeros(0),
            torch.zeros(3, dtype=torch.bool),
            torch.zeros(3, dtype=torch.uint16),
            torch.zeros(3, dtype=torch.float8_e4m3fn),
            object(),
        ],
        "nothing": [],
        "names": {"file": f"rank-{rank}"},
    }
    found = {name: _refusal(lambda nest=nest: SameBatch(mesh).check(nest)) for name, nest in given.items()}
    later = SameBatch(mesh)
    for _ in range(1000):
        later.check([torch.zeros(1)])
    found["later"] = _refusal(lambda: later.check([torch.full((1,), float(rank))]))
    return found


def test_what_differs_is_named() -> None:
    first, second = run_ranks(_compared, 2)
    assert first == second
    assert not any(first[name] for name in ("rounding", "kinds", "nothing", "names"))
    assert "batch['ids'] differ, such as 3 and 4" in first["one token"]
    assert "batch['ids'] differ" in first["order"]
    assert "batch[0] float32[2] and batch[0] float32[3]" in first["shape"]
    assert "True and batch['causal'] False" in first["flag"]
    assert "such as 0 and 1" in first["later"]


def _four() -> tuple[str, str]:
    rank = dist.get_rank()
    mesh = Mesh([("tensor", 2), ("data", 2)], device_type="cpu")
    by_data = _refusal(lambda: SameBatch(mesh).check([torch.full((1,), rank // 2)]))
    one_wrong = _refusal(lambda: SameBatch(mesh).check([torch.full((1,), int(rank == 3))]))
    return by_data, one_wrong


def test_data_ranks_have_samples_of_their_own() -> None:
    found = run_ranks(_four, 4)
    assert [by_data for by_data, _ in found] == [""] * 4
    assert [bool(wrong) for _, wrong in found] == [False, False, True, True]
    assert "ranks 2 and 3" in found[2][1]


def scaled(number: int, model: nn.Module) -> None:
    """Gradients of one rank are not those of the others."""
    if number == 1 and dist.get_rank() == 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2.0)


@torch.no_grad()
def written(number: int, model: nn.Module) -> None:
    """A weight is written on one rank."""
    if number == 1 and dist.get_rank() == 1:
        next(model.parameters()).add_(0.1)


def loaded(number: int, model: nn.Module) -> None:
    """Late, where only what follows a load is compared."""
    if number == 5 and dist.get_rank() == 1:
        written(1, model)


STRATEGIES: dict[str, list[Any]] = {
    "ddp": ["ddp"],
    "replicas of shards": [("parallel_mode", ([("zero", 2), ("data", 2)], None)), "fsdp"],
    "replicas of parts": [("parallel_mode", ([("tensor", 2), ("data", 2)], None))],
    "masters": ["ddp", ("half", {"dtype": "bf16", "master_weights": True})],
    "zero1": ["zero1"],
}


def _job(strategy: list[Any]) -> Any:
    torch.manual_seed(0)
    return auto_accelerate(
        Net(),
        torch.optim.AdamW,
        torch.randn(96, 8),
        lambda batch, output: nn.functional.mse_loss(output, batch),
        dataloader_args={"batch_size": 8},
        load_strategy=strategy,
    )[1]


def _drifts(strategy: list[Any], change: Callable[[int, nn.Module], None] | None, loads: bool) -> int:
    """Updates of this rank by its own loop."""
    result = _job(strategy)
    for number, batch in enumerate(result.dataloader):
        result.optim.zero_grad()
        result.loss_func(batch, result.model(batch)).backward()
        if loads and number == 5:
            checkpoint.import_state_dict(result, checkpoint.export_state_dict(result))
        if change is not None:
            change(number, result.model)
        result.optim.step()
        dist.barrier()  # what others have written is there
    return number + 1


@pytest.mark.parametrize(
    ("strategy", "change", "loads", "updates"),
    [
        ("ddp", scaled, False, "[123]"),
        ("ddp", written, False, "[123]"),
        ("ddp", loaded, True, "[67]"),
        ("ddp", loaded, False, "10"),
        ("masters", scaled, False, "[123]"),
        ("replicas of shards", scaled, False, "[123]"),
        ("replicas of parts", scaled, False, "[123]"),
    ],
)
def test_copies_of_weights_that_differ_end_all_ranks(
    strategy: str, change: Any, loads: bool, updates: str
) -> None:
    num_ranks = 4 if strategy.startswith("replicas") else 2
    outcomes = catch_ranks(_drifts, num_ranks, args=(STRATEGIES[strategy], change, loads), timeout_s=100)
    assert not [outcome for outcome in outcomes if outcome.status in ("returned", "timed_out")]
    said = [str(outcome.error) for outcome in outcomes if isinstance(outcome.error, StepError)]
    assert said
    assert "holds other weights than rank" in said[0]
    assert re.search(f"after update {updates},", said[0]), said[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_of_weights_that_are_equal_are_no_news(strategy: str) -> None:
    num_ranks = 4 if strategy.startswith("replicas") else 2
    ended = run_ranks(_drifts, num_ranks, args=(STRATEGIES[strategy], None, True), timeout_s=100)
    assert ended == [12] * num_ranks


def _with_gradients(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose updates count, and change nothing."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _left_behind() -> str:
    weights = SameWeights(Mesh([("data", 2)], device_type="cpu"), [Net()], "late")
    optimizer = _with_gradients(Net())
    weights.follow(optimizer)
    try:
        for _ in range(3 if dist.get_rank() == 0 else 0):
            optimizer.step()
    except StepError as error:
        return str(error)
    return ""


def test_a_rank_that_makes_no_update_is_named() -> None:
    said = run_ranks(_left_behind, 2, timeout_s=60)
    assert "rank 0 made update 3, but one of the ranks 1 has not reached update 1" in said[0]


def _rounded(lets_go: bool) -> bool:
    torch.manual_seed(0)
    model = Net()
    weights = SameWeights(Mesh([("data", 2)], device_type="cpu"), [model], "rounded")
    with torch.no_grad():
        next(model.parameters()).mul_(1.0 + 1e-6 * dist.get_rank())
    optimizer = _with_gradients(model)
    if lets_go:  # of gradients in its step, as those that save memory do
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    weights.follow(optimizer)
    for _ in range(2):
        _with_gradients(model)
        optimizer.step()
        dist.barrier()
    return weights._is_warned


@pytest.mark.parametrize("lets_go", [False, True])
def test_rounding_is_a_warning(lets_go: bool) -> None:
    assert run_ranks(_rounded, 2, args=(lets_go,), timeout_s=60) == [True, True]


def _keys_after(num_updates: int) -> int:
    torch.manual_seed(0)
    weights = SameWeights(Mesh([("data", 2)], device_type="cpu"), [Net()], "kept")
    optimizer = _with_gradients(Net())
    weights.follow(optimizer)
    before = agreement.default_store().num_keys()
    for _ in range(num_updates):
        weights.begin_anew()  # each is compared
        optimizer.step()
        dist.barrier()
    return int(agreement.default_store().num_keys()) - before


def test_the_store_keeps_what_the_last_updates_need() -> None:
    few, many = (max(run_ranks(_keys_after, 2, args=(number,), timeout_s=60)) for number in (4, 12))
    assert many <= few + 2


def _left_out(strategy: list[Any], what: str) -> None:
    # A read of other sizes ends ranks without words at once, if the thread is all that sees it.
    same_place._POLL_S, same_place.STUCK_S = 2.0 if what == "read" else 0.2, 2.0  # type: ignore[misc]
    result = _job(strategy)
    for number, batch in enumerate(result.dataloader):
        is_odd = number == 1 and dist.get_rank() == 1
        if is_odd and what == "loop":
            dist.barrier()  # as at the end of an epoch
        elif is_odd and what == "evaluation":
            with torch.no_grad():
                result.model(batch)
        elif is_odd and what == "method":
            with torch.no_grad():
                result.model.hidden(batch)
        elif is_odd and what == "read":
            nn.functional.linear(batch, result.model.up.weight)
        elif is_odd and what == "export":
            checkpoint.export_state_dict(result)
        elif is_odd and what == "save":
            checkpoint.save("not written", result)
        elif is_odd and what == "freeze":
            next(result.model.parameters()).requires_grad_(False)
        result.optim.zero_grad()
        loss = result.loss_func(batch, result.model(batch))
        if not (is_odd and what == "backward"):
            loss.backward()
            if is_odd and what == "norm":
                torch.nn.utils.clip_grad_norm_(result.model.parameters(), 1.0)
            if not (is_odd and what == "step"):
                result.optim.step()
        if what == "backward":
            time.sleep(0.5)


@pytest.mark.parametrize(
    ("strategy", "what", "calls"),
    [
        (["fsdp"], "backward", "forward, forward"),
        (["zero1"], "step", "forward, backward, forward, backward"),
        (["ddp"], "loop", "nothing"),
        (["fsdp"], "norm", "forward, backward"),
        (["fsdp"], "evaluation", "forward without gradients"),
        (["fsdp"], "method", "hidden() without gradients"),
        (["zero2"], "method", "hidden() without gradients"),
        (["fsdp"], "read", "a read of a divided tensor"),
        (["zero2"], "export", "an export of whole weights"),
        (["zero1"], "save", "checkpoint.save"),
        (["fsdp"], "freeze", "a forward pass after freezing or thawing"),
        ([("parallel_mode", ([("tensor", 2)], None))], "backward", "forward, forward"),
    ],
)
def test_a_rank_that_leaves_out_a_call_ends_all_within_seconds(
    strategy: list[Any], what: str, calls: str
) -> None:
    outcomes = catch_ranks(_left_out, 2, args=(strategy, what), timeout_s=100)
    assert not [outcome for outcome in outcomes if outcome.status in ("returned", "timed_out")]
    said = "".join(outcome.output for outcome in outcomes)
    assert "the ranks are at different places, and none can go on. After update 1, rank" in said
    assert f"rank 1 has called {calls}" in said or f"rank 1 {calls}" in said


def _with_a_learned_loss(averages: bool) -> list[str]:
    result, told = _job(["fsdp"]), list[str]()
    other = _job(["zero1", ("half", {"dtype": "bf16", "master_weights": True})])
    agreement.log.addFilter(lambda record: told.append(record.getMessage()) or False)
    factors = [nn.Parameter(torch.ones(())) for _ in range(2)]
    optimizers = [torch.optim.SGD([factor], lr=0.1) for factor in factors]
    for batch in result.dataloader:
        (factors[0] * factors[1].square() * result.loss_func(batch, result.model(batch))).backward()
        for factor in factors if averages else ():
            dist.all_reduce(factor.grad, op=dist.ReduceOp.AVG)
        for optimizer in (result.optim, *optimizers):
            optimizer.step()
        other.train_step(batch)
        dist.barrier()
    dist.destroy_process_group()
    optimizers[0].step()  # of a script that goes on alone
    return [message for message in told if "that auto_accelerate did not create" in message]


@pytest.mark.parametrize("averages", [False, True])
def test_weights_outside_of_the_model_that_drift_are_said_once(averages: bool) -> None:
    told = run_ranks(_with_a_learned_loss, 2, args=(averages,), timeout_s=60)
    assert [len(messages) for messages in told] == [0 if averages else 2] * 2


class Centred(Net):
    """Subtracts a running mean of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        centre = self.get_buffer("centre")
        with torch.no_grad():
            centre.lerp_(x.mean(0), 0.5)
        return super().forward(x - centre)


def _plain_job(kind: type[nn.Module], strategy: list[str]) -> Any:
    torch.manual_seed(0)
    _, result, _ = auto_accelerate(
        kind(),
        torch.optim.SGD,
        loss_func=lambda batch, output: output.square().mean(),
        optim_args={"lr": 0.1},
        load_strategy=strategy,
    )
    return result


def _of_samples(kind: type[nn.Module], num_rows: int) -> list[str]:
    told = list[str]()
    agreement.log.addFilter(lambda record: told.append(record.getMessage()) or False)
    result = _plain_job(kind, ["ddp"])
    for number in range(3):
        batch = torch.randn(
            num_rows if dist.get_rank() else 4,
            8,
            generator=torch.Generator().manual_seed(number + 10 * dist.get_rank()),
        )
        result.loss_func(batch, result.model(batch)).backward()
        result.optim.step()
        dist.barrier()
    return [message for message in told if "depends on this rank's samples" in message]


@pytest.mark.parametrize(
    ("kind", "num_rows", "words"),
    [(Centred, 4, "buffer centre"), (Net, 2, "numbers of samples"), (Net, 4, "")],
)
def test_what_is_of_the_samples_of_a_rank_is_said_once(
    kind: type[nn.Module], num_rows: int, words: str
) -> None:
    for told in run_ranks(_of_samples, 2, args=(kind, num_rows), timeout_s=60):
        assert [words in message for message in told] == [True] * bool(words)


def _with_a_loss_that_reads_the_model() -> list[bool]:
    torch.manual_seed(0)
    model = Net()
    auto_accelerate(
        model,
        torch.optim.SGD,
        torch.randn(16, 8),
        lambda batch, output: output.square().mean() + sum(p.square().sum() for p in model.parameters()),
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 4},
        load_strategy=[("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"],
    )
    return [parameter.grad is None for parameter in model.parameters()]


def test_what_is_tried_before_training_leaves_no_gradients() -> None:
    assert all(map(all, run_ranks(_with_a_loss_that_reads_the_model, 2, timeout_s=60)))


def _meets_alone() -> str:
    place = same_place.SamePlace("alone", [], [])
    agreement.default_store().set_timeout(timedelta(seconds=0.5))
    try:
        if dist.get_rank() == 0:
            place.meet("S")
    except RankError as error:
        return str(error)
    time.sleep(2)
    return ""


def test_a_rank_waits_for_the_others_no_longer_than_the_process_group() -> None:
    first, _ = run_ranks(_meets_alone, 2, timeout_s=20)
    assert first.startswith("rank 0 has waited 0:00:00.500000 for the others to call checkpoint.save")


def test_code_beside_the_package_does_not_count_as_waiting() -> None:
    folder = Path(same_place.__file__).parent.parent
    assert f"{folder}/job/job.py".startswith(same_place._COMMUNICATION)
    assert not f"{folder}_by_others/train.py".startswith(same_place._COMMUNICATION)


def _leaves_the_group() -> list[str]:
    errors: list[str] = []
    threading.excepthook = lambda args: errors.append(str(args.exc_value))
    same_place._POLL_S = same_place.STUCK_S = 0.05  # type: ignore[misc]
    auto_accelerate(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        torch.optim.SGD,
        load_strategy=["fsdp"],
        optim_args={"lr": 0.1},
    )
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)
    return errors


def test_the_watch_of_places_ends_with_the_process_group() -> None:
    """A program that goes on without it sees no error of a thread."""
    assert run_ranks(_leaves_the_group, 2, timeout_s=60) == [[], []]


def _parameters_after(strategy: list[str]) -> list[bool]:
    result = _plain_job(Net, strategy)
    for _ in range(2):
        result.loss_func(None, result.model(torch.ones(4, 8))).backward()
        result.optim.step()
    parameters = [weakref.ref(parameter) for parameter in result.model.parameters()]
    del result
    gc.collect()
    return [parameter() is None for parameter in parameters]


@pytest.mark.parametrize("strategy", [["ddp"], ["zero1"], ["fsdp"]])
def test_what_watches_a_job_keeps_none_of_its_memory(strategy: list[str]) -> None:
    for is_free in run_ranks(_parameters_after, 2, args=(strategy,), timeout_s=60):
        assert is_free
        assert all(is_free)
