"""What ``optim_func`` is called with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.errors import CheckpointError, InputError
from atorch_ns.job import Result
from atorch_ns.job.optimizer.step_optimizer import inner_optimizer
from atorch_ns.job.optimizer.user_optimizer import choose_fused, step_on_local_parts
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import (
    ADAMW,
    accelerate_case,
    accelerated_run,
    assert_parity,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import catch_ranks, run_ranks


def by_dimensions(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """Decays matrices alone, in groups of its own."""
    listed = list(parameters)
    decayed = [parameter for parameter in listed if parameter.ndim >= 2]
    others = [parameter for parameter in listed if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=lr
    )


def _trained(strategy: Sequence[Any], steps: int = 2) -> Result:
    torch.manual_seed(0)
    result = accelerate_case(
        get_case("mlp"), strategy, optim_func=by_dimensions, optim_args={"lr": 0.01}, steps=steps
    )
    assert result.dataloader is not None
    for batch in result.dataloader:
        result.train_step(batch)
    return result


def _optimizer(result: Result) -> torch.optim.Optimizer:
    assert result.optim is not None
    return result.optim


@pytest.mark.parametrize("strategy", [[], [("half", "bf16")]], ids=str)
def test_a_function_that_filters_parameters_makes_its_own_groups(strategy: Sequence[Any]) -> None:
    groups = _optimizer(_trained(strategy)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [{parameter.ndim for parameter in group["params"]} for group in groups] == [{2}, {1}]


def test_its_groups_are_named_in_checkpoints(tmp_path: Path) -> None:
    saved = _trained([])
    checkpoint.save(tmp_path / "one", saved)
    loaded = _trained([], steps=1)
    checkpoint.load(tmp_path / "one", loaded)
    for mine, other in zip(loaded.model.parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(
            _optimizer(loaded).state[mine]["exp_avg"], _optimizer(saved).state[other]["exp_avg"]
        )


def test_a_checkpoint_of_its_groups_is_refused_by_one_group(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", _trained([]))
    one_group = accelerate_case(get_case("mlp"), [], steps=1)
    with pytest.raises(CheckpointError, match="group"):
        checkpoint.load(tmp_path / "one", one_group)


def _dimensions(strategy: Sequence[Any]) -> list[set[int]]:
    return [
        {parameter.ndim for parameter in group["params"]}
        for group in _optimizer(_trained(strategy)).param_groups
    ]


@pytest.mark.parametrize("strategy", [["ddp"], ["fsdp"]], ids=str)
def test_whole_and_row_sharded_parameters_come_as_a_list(strategy: Sequence[Any]) -> None:
    assert run_ranks(_dimensions, 2, args=(strategy,), timeout_s=60)[1] == [{2}, {1}]


def test_where_parameters_are_divided_it_is_said_to_group_by_optim_param_func() -> None:
    for outcome in catch_ranks(_dimensions, 2, args=(["zero1"],), timeout_s=60):
        assert isinstance(outcome.error, InputError)
        assert "split groups by optim_param_func" in outcome.message


def test_an_attribute_error_of_the_function_itself_is_left_as_it_is() -> None:
    def broken(parameters: Any) -> torch.optim.Optimizer:
        return parameters.missing  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="missing"):
        accelerate_case(get_case("mlp"), [], optim_func=broken, optim_args={})


class Own(torch.optim.AdamW):
    """A user's class may do anything in its step."""


def _made(groups: Any) -> torch.optim.Optimizer:
    """A function of the user's, which takes what it takes."""
    return torch.optim.AdamW(groups)


def _groups(**options: Any) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(2, 2))], **options}]


@pytest.mark.parametrize(
    ("optim_func", "optim_args", "groups", "used"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}, _groups(), True),
        (torch.optim.Adam, None, _groups(), True),
        (torch.optim.SGD, {"lr": 0.1}, _groups(lr=0.2), True),
        (partial(torch.optim.AdamW, lr=1e-3), None, _groups(), True),
        (torch.optim.AdamW, {"fused": False}, _groups(), False),
        (torch.optim.AdamW, {"foreach": True}, _groups(), False),
        (torch.optim.AdamW, {"foreach": None}, _groups(), True),
        (partial(torch.optim.AdamW, foreach=False), None, _groups(), False),
        (torch.optim.AdamW, {"differentiable": True}, _groups(), False),
        (torch.optim.AdamW, None, _groups(fused=False), False),
        (torch.optim.RMSprop, None, _groups(), False),
        (Own, None, _groups(), False),
        (_made, None, _groups(), False),
    ],
)
def test_when_it_is_used(optim_func: Any, optim_args: Any, groups: Any, used: bool) -> None:
    used_fused, why = choose_fused(optim_func, optim_args, groups)
    assert used_fused == used
    assert bool(why) == used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_on_a_cpu_are_left_to_the_loop(dtype: torch.dtype) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(64, dtype=dtype))]}]
    used, why = choose_fused(torch.optim.SGD, {"lr": 0.1}, groups)
    assert not used
    assert "not right for" in why


@pytest.mark.parametrize("in_group", [False, True])
def test_momentum_of_parameters_that_are_used_late_is_left_to_the_loop(in_group: bool) -> None:
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    group = {"params": [early, late], **({"momentum": 0.9} if in_group else {})}
    given = {"lr": 0.1, **({} if in_group else {"momentum": 0.9})}
    used, why = choose_fused(torch.optim.SGD, given, [group])
    assert not used
    assert "first gradient after the first step" in why
    optimizer = torch.optim.SGD([group], **given, fused=True)
    early.grad = torch.ones(2)
    optimizer.step()
    late.grad = torch.ones(2)
    with pytest.raises(TypeError, match="expected Tensor"):  # when torch has mended it, this fails
        optimizer.step()


def test_what_stands_in_the_way_is_said() -> None:
    meta = [{"params": [nn.Parameter(torch.ones(2, device="meta"))]}]
    assert choose_fused(torch.optim.AdamW, None, meta) == (
        False,
        "AdamW: not fused, since there is no fused kernel for meta",
    )


def _mixtures() -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """This rank's parts after two steps, by the optimizer: of a fused kernel and of a loop."""
    mesh, rows = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), init_device_mesh("cpu", (2, 1))
    found = {}
    for kind, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
    ):
        pair = []
        for fused in (True, False):
            parameters = [
                nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])),
                nn.Parameter(torch.ones(2)),
                nn.Parameter(DTensor.from_local(torch.ones(2, 4), rows, [Shard(1), Replicate()])),
            ]
            given = {"lr": 0.1, **options}
            assert choose_fused(kind, given, [{"params": parameters}])[0]
            optimizer = kind(parameters, **given, fused=fused)
            step_on_local_parts(optimizer)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(2):
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, 1.0 + step)
                # Added up by ranks that have half of it each.
                whole = DTensor.from_local(torch.full((4, 2), 0.5 + step / 2), mesh, [Partial()])
                parameters[0].grad = whole
                assert optimizer.step(lambda: 2.0) == 2.0
                schedule.step()
            assert all(
                isinstance(one, DTensor) for one in optimizer.state[parameters[0]].values() if one.dim() > 1
            )
            pair.append([getattr(one, "to_local", one.detach)().detach() for one in parameters])
        found[kind.__name__] = (pair[0], pair[1])
    return found


def test_dtensors_and_plain_tensors_are_updated_in_one_call() -> None:
    for updated in run_ranks(_mixtures, 2, timeout_s=60):
        for kind, (fused, looped) in updated.items():
            torch.testing.assert_close(fused, looped, msg=kind)


class Derived(torch.optim.NAdam):
    """A user's."""


def _complex_updates() -> dict[str, float]:
    """The largest difference of complex parameters, whole and cut into unequal parts, after two steps; of what moved."""
    mesh = init_device_mesh("cpu", (2,))
    weight, *gradients = torch.randn(3, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    found = {}
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, Derived):
        for foreach in (False, True):
            whole = nn.Parameter(weight.clone())
            parts = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
            optimizers = [kind([one], lr=0.1, foreach=foreach) for one in (whole, parts)]
            step_on_local_parts(optimizers[1])
            for gradient in gradients:
                whole.grad, parts.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
                for optimizer in optimizers:
                    optimizer.step()
            moved = (whole.detach() - weight).abs().max()
            apart = (parts.full_tensor().detach() - whole.detach()).abs().max()
            found[f"{kind.__name__}, foreach={foreach}"] = float(apart / moved)
    return found


def test_complex_numbers_in_unequal_parts_are_updated() -> None:
    """By torch alone they stay as they are: their pairs of real numbers are copies of the whole (2.13)."""
    for errors in run_ranks(_complex_updates, 2, timeout_s=60):
        assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=str)
def test_it_trains_as_the_loop_does_and_the_report_says_which(options: dict[str, Any]) -> None:
    case = get_case("tied_llama")
    arguments = {**ADAMW, **options}
    assert_parity(compare(reference_run(case), accelerated_run(case, [], optim_args=arguments)))
    result = accelerate_case(case, [], optim_args=arguments)
    assert result.optim is not None
    used = inner_optimizer(result.optim).param_groups[0]["fused"]
    assert used is (not options)
    assert any("AdamW: fused" in note for note in result.report.notes) == used


def _overflow(strategy: list[Any]) -> tuple[bool, bool]:
    """Whether a step with an infinite gradient is skipped, and leaves the weights alone."""
    result = accelerate_case(get_case("mlp"), strategy)
    assert result.optim is not None
    assert result.loss_func is not None
    case = get_case("mlp")
    batch = case.make_batch(4, 0)
    before = [parameter.detach().clone() for parameter in result.model.parameters()]
    (result.loss_func(batch, case.call(result.model, batch)) * float("inf")).backward()
    result.optim.step()
    same = [bool((old == new).all()) for old, new in zip(before, result.model.parameters(), strict=True)]
    return bool(result.train_step.skipped), all(same)


def test_a_scaled_step_is_skipped_with_fused_updates_of_dtensors() -> None:
    for found in run_ranks(_overflow, 2, args=(["fsdp", ("amp_native", "fp16")],), timeout_s=60):
        assert found == (True, True)


class Sparse(nn.Module):
    """An embedding whose gradient is sparse, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(ids))
        return out


@pytest.mark.parametrize("methods", [[], ["zero1"]], ids=["one", "zero1"])
def test_sparse_gradients_are_left_to_the_loop(methods: list[Any]) -> None:
    notes = (
        run_ranks(_sparse_notes, 2, args=(methods,), timeout_s=60)[0] if methods else _sparse_notes(methods)
    )
    assert any("table is an Embedding with sparse=True" in note for note in notes)


def _sparse_notes(methods: list[Any]) -> list[str]:
    _, result, _ = auto_accelerate(
        Sparse(),
        torch.optim.SGD,
        torch.arange(16)[:, None],
        lambda _, output: output.square().mean(),
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8},
        load_strategy=methods,
    )
    assert result is not None
    for batch in result.dataloader or ():
        result.train_step(batch)
    return list(result.report.notes)


@pytest.mark.parametrize(
    ("model", "optim_func", "reason"),
    [
        (nn.Linear(4, 4, dtype=torch.complex64), torch.optim.AdamW, "complex parameters"),
        (nn.Linear(4, 4, dtype=torch.complex64), partial(torch.optim.Adam, lr=1e-3), "complex parameters"),
        (nn.Embedding(4, 4, sparse=True), torch.optim.SGD, "sparse gradients"),
        (nn.Linear(4, 4).bfloat16(), partial(torch.optim.SGD, lr=0.1, momentum=0.9), "loses the momentum"),
    ],
)
def test_a_fused_kernel_that_cannot_be_right_is_refused_at_once(
    model: nn.Module, optim_func: Any, reason: str
) -> None:
    with pytest.raises(InputError, match=rf"fused=True for .*{reason}.*Leave fused out"):
        auto_accelerate(model, optim_func, optim_args={"fused": True}, load_strategy=[])


def test_a_fused_kernel_that_was_asked_for_is_used() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, result, _ = auto_accelerate(
            nn.Linear(4, 4).to(dtype), torch.optim.SGD, optim_args={"fused": True}, load_strategy=[]
        )
        assert result is not None
        assert inner_optimizer(result.optim).param_groups[0]["fused"]
