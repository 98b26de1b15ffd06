"""Gradient reducer: the means that torch's DDP gives, in buckets that are watched, and an optimizer that comes later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atorch_ns import attach_optimizer, auto_accelerate
from atorch_ns.errors import AtorchError, InputError, StepError
from atorch_ns.job import Result
from atorch_ns.job.reducer import GradientReducer
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case, whole_parameters
from atorch_ns.testing.workers import catch_ranks, run_ranks

OWN = ("ddp", {"reducer": "own", "bucket_cap_mb": 0.001})


class Net(nn.Module):
    """Layers of two dtypes, one of which only some steps use, one that none does, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)
        self.wide = nn.Parameter(torch.randn(12, dtype=torch.float64))

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if more:
            x = self.sometimes(x)
        return (x * self.wide).square().mean()


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: copy.deepcopy(p.grad) for name, p in module.named_parameters()}


def _passes() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Gradients by DDP and by the reducer: all ranks use a layer, one does, none does, and over two micro-batches."""
    ours, theirs = Net(), Net()
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    reducer = GradientReducer(ours, dist.group.WORLD, bucket_bytes=1000)
    assert reducer.num_buckets > 3
    torch.manual_seed(dist.get_rank())
    found = []
    for more in (True, dist.get_rank() == 1, False):
        ours.zero_grad()
        theirs.zero_grad()
        first, second = torch.randn(2, 5, 12)
        with ddp.no_sync(), reducer.no_sync():
            ddp(first, more=False).backward()
            ours(first, more=False).backward()
        ddp(second, more=more).backward()
        ours(second, more=more).backward()
        assert reducer.synchronised
        found.append((_gradients(ours), _gradients(theirs)))
    return found


def test_gradients_are_those_of_ddp_bit_for_bit() -> None:
    ranks = run_ranks(_passes, 2, timeout_s=60)
    for number in range(3):
        for ours, theirs in (rank[number] for rank in ranks):
            for name, gradient in ours.items():
                if name.startswith("never") or (name.startswith("sometimes") and number == 2):
                    assert gradient is None, name
                else:
                    assert theirs[name] is not None
                    assert torch.equal(gradient, theirs[name]), name


def _watched() -> dict[str, Any]:
    model = Net()
    reducer = GradientReducer(model, dist.group.WORLD, bucket_bytes=1000, predivide=1.0)
    log: list[str] = []
    reducer.before(lambda own, bucket: (log.append("before"), bucket.div_(8.0)))
    done = reducer.after(lambda own, bucket: (log.append("after"), bucket.mul_(8.0)))
    x = torch.full((3, 12), float(dist.get_rank() + 1))
    try:
        reducer.scale_grads(2.0)
    except StepError as error:
        refused = str(error)
    model(x).backward()
    first, counts = _gradients(model), (log.count("before"), log.count("after"), reducer.num_buckets)
    reducer.sync_grad()  # nothing is left to do
    reducer.scale_grads(2.0)
    doubled = _gradients(model)
    done()
    reducer.detach()
    model.zero_grad()
    model(x).backward()
    local = _gradients(model)
    return {
        "first": first,
        "doubled": doubled,
        "local": local,
        "counts": counts,
        "refused": refused,
        "log": log,
    }


def test_hooks_see_every_bucket_once_and_gradients_are_scaled_after_the_reduction_only() -> None:
    ranks = run_ranks(_watched, 2, timeout_s=60)
    for rank in ranks:
        before, after, num = rank["counts"]
        assert before == after == num > 3
        assert len(rank["log"]) == 2 * num  # none after they are taken out
        assert "sync_grad()" in rank["refused"]
        for name, gradient in rank["first"].items():
            if gradient is None:
                assert rank["doubled"][name] is None
                continue
            mean = sum(each["local"][name] for each in ranks) / 2
            torch.testing.assert_close(gradient, mean, rtol=1e-6, atol=1e-9)
            assert torch.equal(rank["doubled"][name], 2 * gradient)


def _idle_on_one_rank() -> Tensor:
    """One rank's loss reaches no parameter."""
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    reducer = GradientReducer(model, dist.group.WORLD)
    out = model(torch.ones(2, 4))
    if dist.get_rank() == 0:
        out.sum().backward()
    reducer.sync_grad()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def test_a_rank_without_a_backward_pass_takes_part() -> None:
    for gradient in run_ranks(_idle_on_one_rank, 2, timeout_s=60):
        assert torch.equal(gradient, torch.ones(4, 4))


def _fails_in_a_hook() -> None:
    result = _accelerated([OWN], torch.optim.SGD)
    assert result.reducer is not None

    def fail(reducer: GradientReducer, bucket: Tensor) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in the hook of a bucket")

    result.reducer.before(fail)
    result.train_step(_batch())


def test_a_hook_that_raises_on_one_rank_ends_all() -> None:
    first, second = catch_ranks(_fails_in_a_hook, 2, timeout_s=60)
    assert second.error_type == "ZeroDivisionError"
    assert first.error_type == "RankError"
    assert "in the hook of a bucket" in first.message


def test_what_cannot_be_reduced_is_refused() -> None:
    run_ranks(_refused, 2, timeout_s=60)


def _summed_in_fp16(predivide: float | None) -> tuple[float, float]:
    """What is sent of a gradient of 40000 on both ranks, and the mean; the largest number of fp16 is 65504."""
    model = nn.Linear(1, 1, bias=False).half()
    reducer = GradientReducer(model, dist.group.WORLD, predivide=predivide)
    sent: list[float] = []
    reducer.before(lambda _, bucket: sent.append(float(bucket)))
    model(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
    assert model.weight.grad is not None
    return sent[0], float(model.weight.grad)


@pytest.mark.parametrize(
    ("predivide", "sent", "mean"),
    [(1.0, 40000.0, float("inf")), (None, 20000.0, 40000.0), (2.0, 20000.0, 40000.0), (8.0, 5000.0, 40000.0)],
)
def test_what_is_divided_before_the_sum_does_not_overflow(
    predivide: float | None, sent: float, mean: float
) -> None:
    assert run_ranks(_summed_in_fp16, 2, args=(predivide,), timeout_s=60) == [(sent, mean)] * 2


def _gradients_of(strategies: list[list[Any]]) -> list[dict[str, Tensor | None]]:
    found = []
    for strategy in strategies:
        result = _accelerated(strategy, torch.optim.SGD, gradient_accumulation_steps=2)
        result.train_step.forward_backward(_batch())
        found.append(_gradients(result.model))
    return found


def test_gradients_are_the_same_however_they_are_divided_before_the_sum() -> None:
    own = [[("ddp", {"reducer": "own", "predivide": factor})] for factor in (None, 1.0, 3.0, 16.0)]
    for whole, *others in run_ranks(_gradients_of, 2, args=(own,), timeout_s=60):
        for gradients in others:
            torch.testing.assert_close(gradients, whole, rtol=1e-6, atol=1e-8)


def _refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="must be positive"):
        GradientReducer(model, dist.group.WORLD, predivide=0.0)
    sparse = nn.ModuleList(nn.Embedding(4, 2, sparse=True) for _ in range(2))
    sparse[1].weight = sparse[0].weight  # of two users of a weight each may give it another kind of gradient
    GradientReducer(sparse, dist.group.WORLD)
    with pytest.raises(StepError, match="no sparse gradients"):
        sparse[0](torch.tensor([1])).sum().backward()


def _batch(place: int | None = None) -> tuple[Tensor, Tensor]:
    """The batch of a rank, or of its place among those with data of their own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank if place is None else place)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 2, generator=generator)


def _loss(batch: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    return (out - batch[1]).square().mean()


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2)
    )


def _accelerated(strategy: list[Any], optim_func: Any = None, **fields: Any) -> Result:
    _, result, _ = auto_accelerate(
        _model(),
        optim_func,
        **{"loss_func": _loss, **fields},
        optim_args={"lr": 0.1} if optim_func else None,
        model_input_format="first",
        load_strategy=strategy,
    )
    assert result is not None
    return result


def _trained(strategies: list[list[Any]]) -> list[tuple[dict[str, Tensor], list[float], str]]:
    found = []
    for strategy in strategies:
        result = _accelerated(strategy, torch.optim.AdamW, max_grad_norm=0.5, gradient_accumulation_steps=2)
        losses = [float(result.train_step(_batch())) for _ in range(3)]
        found.append((whole_parameters(result), losses, str(result.report)))
    return found


@pytest.mark.parametrize(
    "beside", [[], [("half", "bf16")], ["checkpoint"], [("compile", {"backend": "eager"})]]
)
def test_a_job_reduced_by_buckets_trains_as_one_with_ddp(beside: list[Any]) -> None:
    for (ours, losses, report), (theirs, expected, _) in run_ranks(
        _trained, 2, args=([[OWN, *beside], ["ddp", *beside]],), timeout_s=100
    ):
        assert losses == expected
        assert "of result.reducer" in report
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-7)


def _options(name: str) -> dict[str, Any]:
    return {"weight_decay": 0.0} if name.endswith("bias") else {}


def _attached(strategies: list[list[Any]]) -> list[tuple[dict[str, Tensor], dict[str, Tensor], list[int]]]:
    found = []
    for strategy in strategies:
        late = _accelerated(strategy, sample_batch=_batch())
        assert late.optim is None
        late = attach_optimizer(late, torch.optim.AdamW, options_of=_options, lr=0.1, weight_decay=0.3)
        early = _accelerated(
            strategy,
            torch.optim.AdamW,
            sample_batch=_batch(),
            optim_param_func=lambda model: [
                {
                    "params": [p for n, p in model.named_parameters() if not n.endswith("bias")],
                    "weight_decay": 0.3,
                },
                {
                    "params": [p for n, p in model.named_parameters() if n.endswith("bias")],
                    "weight_decay": 0.0,
                },
            ],
        )
        for result in (late, early):
            for _ in range(2):
                result.train_step(_batch(result.job.data_rank))
        assert late.optim is not None
        found.append(
            (
                whole_parameters(late),
                whole_parameters(early),
                [len(g["params"]) for g in late.optim.param_groups],
            )
        )
    return found


STRATEGIES: list[list[Any]] = [
    [OWN],
    ["zero1"],
    ["fsdp", ("half", "bf16")],
    [("parallel_mode", ([("pipeline", 2)], None))],
]


def test_an_optimizer_that_joins_late_is_the_one_of_the_start() -> None:
    for rank in run_ranks(_attached, 2, args=(STRATEGIES,), timeout_s=100):
        for late, early, sizes in rank:
            assert len(sizes) == 2
            for name, value in late.items():
                assert torch.equal(value, early[name]), name


def _attached_with_one_group() -> tuple[float, bool]:
    result = _accelerated(["ddp"])
    result = attach_optimizer(result, torch.optim.SGD, options_of=lambda _: {"lr": 0.0}, lr=0.1)
    assert result.optim is not None
    before = whole_parameters(result)
    result.train_step(_batch())
    after = whole_parameters(result)
    return result.optim.param_groups[0]["lr"], all(torch.equal(before[name], after[name]) for name in before)


def test_options_that_are_the_same_for_all_parameters_hold() -> None:
    assert run_ranks(_attached_with_one_group, 2, timeout_s=60) == [(0.0, True)] * 2


def _misused() -> list[str]:
    messages = []
    result = _accelerated(["ddp"])
    for attach in (
        lambda: result.train_step(_batch()),
        lambda: attach_optimizer(result, lambda parameters: None),  # type: ignore[arg-type,return-value]
        lambda: attach_optimizer(result, torch.optim.SGD, options_of=lambda name: [name], lr=0.1),  # type: ignore[arg-type,return-value]
        lambda: attach_optimizer(_accelerated(["ddp"], torch.optim.SGD), torch.optim.SGD, lr=0.1),
        lambda: attach_optimizer(result, torch.optim.SGD, options_of=lambda _: {"weight_decy": 0.0}, lr=0.1),
        lambda: result.mean(torch.ones(2)),
        lambda: attach_optimizer(result, torch.optim.SGD, options_of=lambda _: {"params": []}, lr=0.1),
        lambda: _accelerated([("ddp", {"reducer": "torch", "predivide": 2.0})], torch.optim.SGD),
    ):
        with pytest.raises(AtorchError) as caught:
            attach()
        messages.append(str(caught.value))
    attach_optimizer(result, torch.optim.SGD, lr=0.1).train_step(_batch())
    return messages


def test_what_cannot_be_attached_is_refused_in_words() -> None:
    for none, nothing, options, twice, misspelt, vector, params, predivide in run_ranks(
        _misused, 2, timeout_s=60
    ):
        assert "needs optim_func" in none
        assert "or call attach_optimizer" in none
        assert "'weight_decy', which the optimizer does not know. Did you mean" in misspelt
        assert "options_of gave 'params'" in params
        assert "mean takes one number; it got tensor([1., 1.])" in vector
        assert "returned a NoneType, not a torch.optim.Optimizer" in nothing
        assert "options_of gave a list" in options
        assert "has an optimizer already" in twice
        assert "leave out reducer: torch" in predivide


def _without_loss(strategy: list[Any]) -> Tensor:
    result = _accelerated(strategy, loss_func=None, sample_batch=_batch())
    (out,) = result.infer_step([_batch(result.job.data_rank)])
    return out.clone()


@pytest.mark.parametrize("strategy", [["fsdp"], [("parallel_mode", ([("pipeline", 2)], None))]])
def test_a_job_without_loss_or_optimizer_infers(strategy: list[Any]) -> None:
    for rank, out in enumerate(run_ranks(_without_loss, 2, args=(strategy,), timeout_s=60)):
        generator = torch.Generator().manual_seed(rank if strategy == ["fsdp"] else 0)
        x = torch.randn(6, 8, generator=generator)
        torch.testing.assert_close(out, _model().eval()(x).detach(), rtol=1e-5, atol=1e-6)


def _predivided_experts() -> None:
    methods = [("parallel_mode", [("expert", 2)]), ("ddp", {"reducer": "own", "predivide": 2.0})]
    with pytest.raises(AtorchError, match="predivide applies only to ddp's own reducer"):
        accelerate_case(get_case("hf_mixtral"), methods)


def test_predivide_is_refused_beside_experts_on_several_ranks() -> None:
    run_ranks(_predivided_experts, 2, timeout_s=60)
