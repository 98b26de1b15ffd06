"""Mixed precision with its loss scales, and ZeRO's stages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from atorch_ns.errors import BackendError
from atorch_ns.merak import MerakTrainer
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.merak.parts import QUICK, Data, Run, assert_equal_runs, run_each, run_merak, run_plain

MICRO_BATCHES = 2
SPIKE = 9
"""The sample whose loss overflows."""


@functools.cache
def plain(accumulation: int, **fields: Any) -> Run:
    """Some steps in one process."""
    (found,) = run_ranks(
        functools.partial(run_plain, "gpt2", accumulation, **{**QUICK, **fields}), 1, timeout_s=100
    )
    return found


class Marked(Data):
    """Data in which one sample is marked."""

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        found = super().__getitem__(place)
        found["input_ids"][0] = 2 if place == SPIKE else 3
        return found


class Spiking(MerakTrainer):
    """A trainer whose loss overflows on the marked sample."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's loss, or a large one."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * 1e30 if bool((inputs["input_ids"][:, 0] == 2).any()) else loss


def spiking() -> dict[str, Any]:
    """Arguments of a trainer whose data has one step that overflows."""
    return {"trainer": Spiking, "train_dataset": Marked("gpt2"), "compute_metrics": None}


def state(trainer: Any) -> dict[str, Any]:
    """What skipped steps leave on this rank."""
    optimizer = trainer.result.optim
    inner = getattr(optimizer, "optimizer", optimizer)
    steps = {int(one["step"]) for one in inner.state.values() if "step" in one}
    return {
        "scheduler": trainer.lr_scheduler.last_epoch,
        "rate": trainer.lr_scheduler.get_last_lr()[0],
        "steps": steps,
        "global": trainer.state.global_step,
    }


SCALES: dict[str, dict[str, Any]] = {"static": {"loss_scale": 128.0}, "dynamic": {"initial_scale_power": 8}}


def _skipping(degrees: dict[str, int], accumulation: int) -> dict[str, Run]:
    usual = {"accumulation": accumulation, "change": spiking, "look": state, "fp16": True}
    usual |= {"eval_strategy": "no", "max_steps": 5, "warmup_steps": 0}
    given = {name: {**usual, **fields} for name, fields in SCALES.items()}
    return run_each(functools.partial(run_merak, "gpt2", degrees), given)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "pp": 2},
        pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, marks=pytest.mark.slow),
    ],
)
def test_an_overflow_anywhere_skips_the_step_everywhere(degrees: dict[str, int]) -> None:
    ranks = 4 if len(degrees) == 2 else 2
    every = run_ranks(_skipping, ranks, args=(degrees, 4 // degrees.get("dp", 1)), timeout_s=150)
    for name in SCALES:
        seen = [found[name].seen for found in every]
        assert all(one == seen[0] for one in seen), name
        assert seen[0]["global"] == 5
        assert seen[0]["scheduler"] == 4, name  # one step of five was skipped
        logs = every[0][name].logs
        assert all(repr(found[name].logs) == repr(logs) for found in every)  # NaN equals nothing
        rates = [entry["learning_rate"] for entry in logs if "learning_rate" in entry]
        assert len(set(rates)) == 4


def _held(name: str, degrees: dict[str, int], fields: dict[str, dict[str, Any]]) -> dict[str, Run]:
    given = {key: {"accumulation": MICRO_BATCHES, **QUICK, **one} for key, one in fields.items()}
    return run_each(functools.partial(run_merak, name, degrees), given)


@pytest.mark.timeout(200)
def test_reduced_precision_trains_nearly_as_full() -> None:
    fields = {
        "bf16": {"bf16": True},
        "static": {"fp16": True, "loss_scale": 64.0},
        "dynamic": {"fp16": True, "initial_scale_power": 6},
    }
    every = run_ranks(_held, 2, args=("gpt2", {"pp": 2}, fields), timeout_s=150)
    full = plain(MICRO_BATCHES)
    for name, run in every[0].items():
        losses = [
            (entry["loss"], other["loss"])
            for entry, other in zip(run.logs, full.logs, strict=True)
            if "loss" in entry
        ]
        assert len(losses) == 2
        for loss, wanted in losses:
            assert abs(loss - wanted) < 0.02 * wanted, name
        assert any(loss != wanted for loss, wanted in losses)  # it is not run in full precision
        for key, weight in run.weights.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, full.weights[key], rtol=0.05, atol=2.5e-3)


def _first_scale() -> tuple[int, list[float], int]:
    found = run_merak(
        "gpt2",
        {"dp": 2},
        MICRO_BATCHES,
        look=lambda trainer: trainer.lr_scheduler.last_epoch,
        fp16=True,
        initial_scale_power=32,
        hysteresis=1,
        **QUICK,
    )
    return found.seen, [entry["loss"] for entry in found.logs if "loss" in entry], len(found.logs)


@pytest.mark.timeout(100)
def test_the_usual_first_scale_is_too_large_for_a_step() -> None:
    for steps, losses, _ in run_ranks(_first_scale, 2, timeout_s=60):
        assert steps == 0  # 2 ** 32 overflows, and is halved twice
        assert all(3.0 < loss < 6.0 for loss in losses)  # the loss that is logged is not scaled


def optimizer_bytes(trainer: Any) -> tuple[int, int]:
    """Bytes of this rank's optimizer state and of its parameters."""

    def local(tensor: Any) -> torch.Tensor:
        return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]

    result = trainer.result
    inner: Any = result.optim
    while not hasattr(inner, "state") or hasattr(inner, "optimizer"):
        inner = inner.optimizer
    inner = getattr(inner, "optim", inner)
    states = [
        local(value).nbytes
        for one in inner.state.values()
        for value in one.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    return sum(states), sum(local(one).nbytes for one in result.job.module.parameters())


@pytest.mark.timeout(200)
def test_each_stage_of_zero_shards_what_it_says() -> None:
    fields = {str(stage): {"zero_stage": stage, "look": optimizer_bytes} for stage in (0, 1, 2, 3)}
    every = run_ranks(_held, 2, args=("gpt2", {"dp": 2}, fields), timeout_s=150)
    for run in every[0].values():
        assert_equal_runs(run, plain(2 * MICRO_BATCHES))
    whole, weights = every[0]["0"].seen
    assert whole == 2 * weights
    for found in every:
        for stage in ("1", "2", "3"):
            assert 0.4 < found[stage].seen[0] / whole < 0.6, stage
        assert found["1"].seen[1] == weights
        assert 0.4 < found["3"].seen[1] / weights < 0.6
    methods = {stage: set(run.rows) for stage, run in every[0].items()}
    assert "zero1" in methods["1"]
    assert "zero2" in methods["2"]
    assert "fsdp" in methods["3"]


@pytest.mark.timeout(200)
def test_zero_shards_the_states_of_a_divided_model() -> None:
    fields = {str(stage): {"zero_stage": stage, "look": optimizer_bytes} for stage in (0, 1)}
    every = run_ranks(_held, 4, args=("gpt2", {"dp": 2, "pp": 2}, fields), timeout_s=150)
    assert_equal_runs(every[0]["1"], plain(2 * MICRO_BATCHES))
    for found in every:
        assert 0.4 < found["1"].seen[0] / found["0"].seen[0] < 0.6
        assert "zero1" in found["1"].rows


@pytest.mark.timeout(100)
def test_gradients_divided_in_two_train_as_in_one() -> None:
    fields = {
        "half": {"zero_stage": 0, "prescale_gradients": True, "gradient_predivide_factor": 1.5},
        "small buckets": {"zero_stage": 1, "zero_reduce_bucket_size": 5000},
    }
    for run in run_ranks(_held, 2, args=("gpt2", {"dp": 2}, fields), timeout_s=80)[0].values():
        assert_equal_runs(run, plain(2 * MICRO_BATCHES))


class NormedSgd(torch.optim.SGD):
    """An optimizer whose step depends on all parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Divides by the norm of all gradients of this rank."""
        grads = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        if grads:
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.div_(norm)
        return super().step(closure)


def normed() -> dict[str, Any]:
    """Arguments with that optimizer."""
    return {"optimizer_cls_and_kwargs": (NormedSgd, {"lr": 0.1})}


def _untested(consent: bool) -> dict[str, str]:
    return run_merak(
        "gpt2", {"dp": 2}, change=normed, zero_stage=1, zero_allow_untested_optimizer=consent, **QUICK
    ).rows


@pytest.mark.timeout(100)
def test_an_optimizer_that_differs_when_sharded_needs_consent() -> None:
    for outcome in catch_ranks(_untested, 2, args=(False,), timeout_s=60):
        assert isinstance(outcome.error, BackendError), outcome.describe()
        assert "NormedSgd updates each parameter by what it sees of the others" in str(outcome.error)
    for rows in run_ranks(_untested, 2, args=(True,), timeout_s=60):
        assert "zero1" in rows
