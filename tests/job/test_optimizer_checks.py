"""Optimizers that look at several parameters, where the optimizer of a rank has a part of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from atorch_ns.errors import BackendError
from atorch_ns.job.optimizer.checks import require_separable
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case, accelerated_run
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import error_of

PIPELINE = ("parallel_mode", ([("pipeline", 2)], None))
DIVIDED: list[list[Any]] = [
    ["zero1"],
    [("zero1", {"backend": "fairscale"})],
    [("zero2", {"not_use_fsdp": True})],
    [PIPELINE],
]


class OwnRule(torch.optim.Optimizer):
    """Applies a rule to all parameters with their gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pairs = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.update(pairs, self.param_groups[0]["lr"])

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        raise NotImplementedError


class Normalised(OwnRule):
    """Divides by the norm of all gradients."""

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        norm = torch.stack([gradient.square().sum() for _, gradient in pairs]).sum().sqrt()
        for parameter, gradient in pairs:
            parameter.sub_(gradient / norm * lr)


class Clipped(torch.optim.AdamW):
    """Clips the gradients of all parameters together, at a norm that is seldom reached."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1000.0)
        return super().step(closure)


class StepSize(OwnRule):
    """Estimates its step size from the way made so far, beginning with very little."""

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        if not self.state:
            self.start = [parameter.clone() for parameter, _ in pairs]
            self.size, self.gained, self.seen = 1e-6, 0.0, 0.0
            self.state[pairs[0][0]]["begun"] = True
        for (parameter, gradient), start in zip(pairs, self.start, strict=True):
            self.gained += self.size * float((gradient * (start - parameter)).sum())
            self.seen += self.size * float(gradient.abs().sum())
        self.size = max(self.size, 2 * self.gained / self.seen)
        for parameter, gradient in pairs:
            parameter.sub_(self.size * gradient.sign())


class Sharpness(OwnRule):
    """Climbs along all gradients, and steps with those that the closure gives there."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.square().sum() for parameter in own]).sum().sqrt()
        climbs = [parameter.grad / norm for parameter in own]
        with torch.enable_grad():
            closure()
        for parameter, climb in zip(own, climbs, strict=True):
            parameter.sub_((parameter.grad + climb) * 0.1)


class TrustRatio(OwnRule):
    """Norms of each parameter alone."""

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        for parameter, gradient in pairs:
            parameter.sub_(gradient / gradient.norm() * parameter.norm() * lr)


class Noisy(OwnRule):
    """Adds noise."""

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        for parameter, gradient in pairs:
            parameter.sub_(lr * gradient + lr * torch.randn_like(parameter) + lr * random.random())


class Halving(torch.optim.AdamW):
    """Changes its learning rate itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class Choosy(OwnRule):
    """Needs an option in each group."""

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        for group in self.param_groups:
            kind = Normalised if group["normalised"] else TrustRatio
            own = [(p, p.grad) for p in group["params"] if p.grad is not None]
            kind.update(self, own, lr)  # type: ignore[arg-type]


class Fails(OwnRule):
    """Works on a device that is not here."""

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        if pairs[0][0].numel() < 100:
            raise RuntimeError("the kernel wants more")


def _job(optim_func: Any, **optim_args: Any) -> Any:
    return SimpleNamespace(
        inputs=SimpleNamespace(
            optim_func=optim_func, optim_args=optim_args, optim_param_func=None, optimizer_is_trusted=False
        ),
        plan=SimpleNamespace(sharding=SimpleNamespace(layout="parameters")),
        mesh=object(),
        num_data_ranks=2,
        stage_group=None,
        device=torch.device("cpu"),
    )


ONE: list[dict[str, Any]] = [{"params": []}]


@pytest.mark.parametrize(
    "optim_func",
    [Normalised, Clipped, StepSize, Sharpness, torch.optim.LBFGS, partial(Normalised, lr=0.0)],
    ids=str,
)
def test_what_couples_parameters_is_refused(optim_func: Any) -> None:
    with pytest.raises(BackendError, match="ddp, fsdp or zero2"):
        require_separable(_job(optim_func), ONE)


@pytest.mark.parametrize(
    "optim_func",
    [TrustRatio, Halving, torch.optim.AdamW, lambda groups: torch.optim.Adafactor(list(groups))],
    ids=["norms", "schedule", "torch", "function"],
)
def test_what_updates_each_parameter_by_itself_passes(optim_func: Any) -> None:
    assert require_separable(_job(optim_func), ONE) == ""


def test_an_optimizer_that_the_user_answers_for_is_not_tried() -> None:
    job = _job(Normalised, lr=0.1)
    job.inputs.optimizer_is_trusted = True
    assert require_separable(job, [{"params": []}]) == ""


def test_options_of_groups_are_tried() -> None:
    plain: dict[str, Any] = {"params": [], "normalised": False}
    coupled = {**plain, "normalised": True}
    assert require_separable(_job(Choosy), [plain, {**plain, "lr": 1.0}]) == ""
    with pytest.raises(BackendError):
        require_separable(_job(Choosy), [plain, coupled])


@pytest.mark.parametrize(("optim_func", "why"), [(Noisy, "random"), (Fails, "the kernel wants more")])
def test_what_cannot_be_tried_is_told(optim_func: Any, why: str) -> None:
    assert why in require_separable(_job(optim_func), ONE)


def test_the_trial_is_short_and_leaves_random_states_and_arguments() -> None:
    rate = torch.tensor(0.01)
    states = torch.get_rng_state(), random.getstate()
    begin = time.perf_counter()
    require_separable(_job(Halving, lr=rate), ONE)
    assert time.perf_counter() - begin < 0.5  # some 20 ms on a quiet machine
    require_separable(_job(Noisy), ONE)
    assert float(rate) == pytest.approx(0.01)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def _accelerated(strategy: Any, kind: Any) -> object:
    return accelerate_case(get_case("mlp"), strategy, optim_func=kind, optim_args={"lr": 0.01})


def _refused() -> list[str]:
    kinds = (Normalised, torch.optim.LBFGS)
    return [error_of(partial(_accelerated, strategy, kind)) for strategy in DIVIDED for kind in kinds]


def test_every_rank_refuses_them_where_parameters_are_divided() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    for said in first:
        assert said.startswith("BackendError:")
        assert "ddp, fsdp or zero2" in said or "flat pieces" in said


class OwnRatio(OwnRule):
    """Trust ratios as numbers."""

    def update(self, pairs: list[tuple[Any, Any]], lr: float) -> None:
        for parameter, gradient in pairs:
            parameter.sub_(gradient, alpha=lr * (parameter.norm() / gradient.norm()).item())


def _under_dtensors() -> list[str]:
    said = []
    for name in ("fsdp", "zero2"):
        said += [error_of(partial(_accelerated, [name], kind)) for kind in (StepSize, OwnRatio)]
        for kind in (Normalised, TrustRatio, Halving, Sharpness):
            _accelerated([name], kind)
    return said


def test_numbers_read_out_of_dtensors_are_refused() -> None:
    first, second = run_ranks(_under_dtensors, 2)
    assert first == second
    assert all("reads numbers out of sums" in said for said in first)


def _losses(strategy: Any) -> list[float]:
    run = accelerated_run(get_case("mlp"), strategy, optim_func=Normalised, optim_args={"lr": 0.1})
    return [float(loss) for loss in run.losses]


def _all_losses() -> list[list[float]]:
    return [_losses([name]) for name in ("ddp", "fsdp", "zero2")]


def test_what_is_named_instead_trains_as_one_process() -> None:
    alone = _losses([])
    for losses in run_ranks(_all_losses, 2)[0]:
        assert losses == pytest.approx(alone, rel=1e-5)


def _untried() -> tuple[tuple[str, ...], int]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = accelerate_case(get_case("mlp"), ["zero1"], optim_func=Fails, optim_args={})
    told = [w for w in caught if "could not be tried" in str(w.message)]
    return tuple(result.report.notes), len(told)


def test_one_warning_and_a_note_tell_of_what_could_not_be_tried() -> None:
    ranks = run_ranks(_untried, 2)
    assert [count for _, count in ranks] == [1, 0]
    assert all(any("could not be tried" in note for note in notes) for notes, _ in ranks)


class OwnAdafactor(torch.optim.Adafactor):
    """A user's."""


KINDS = (torch.optim.Adafactor, torch.optim.Rprop, OwnAdafactor)


def _accelerated_with(strategy: Any, kind: Any) -> Any:
    return accelerate_case(get_case("mlp"), strategy, optim_func=kind, optim_args={"lr": 1e-2})


def _not_of_dtensors() -> list[str]:
    strategies = ("fsdp", "zero2")
    return [error_of(partial(_accelerated_with, [name], kind)) for name in strategies for kind in KINDS]


def test_they_are_refused_before_the_first_step() -> None:
    first, second = run_ranks(_not_of_dtensors, 2)
    assert first == second
    names = ("torch.optim.Adafactor", "torch.optim.Rprop", "OwnAdafactor, of torch.optim.Adafactor,")
    for said, name in zip(first, names * 2, strict=True):
        assert said.startswith(f"InputError: {name} cannot update DTensors")
        assert "zero1" in said


def _trained() -> list[str]:
    wrong = []
    for strategy in (["zero1"], [("zero2", {"not_use_fsdp": True})], ["ddp"]):
        for kind in (torch.optim.Rprop, torch.optim.Adafactor):
            result = _accelerated_with(strategy, kind)
            if not torch.isfinite(
                torch.stack([result.train_step(batch) for batch in result.dataloader])
            ).all():
                wrong.append(f"{strategy} {kind.__name__}")
    return wrong


def test_what_is_named_instead_trains_them() -> None:
    assert run_ranks(_trained, 2) == [[], []]


def _step(kind: Any) -> str:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    optimizer = kind([parameter], lr=1e-2)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop])
def test_torch_still_fails_with_them(kind: Any) -> None:
    """Once it does not, the optimizer can leave the table of those that are refused."""
    assert all("in-place" in said for said in run_ranks(_step, 2, args=(kind,)))
