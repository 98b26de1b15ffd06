"""Steps over micro-batches of one's own: the gradients of one process on all samples, whatever ranks hold of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch_ns import auto_accelerate
from atorch_ns.data import weigh
from atorch_ns.errors import AtorchError, InputError
from atorch_ns.job import Result
from atorch_ns.job.train_step import PHASES
from atorch_ns.testing.parity import whole_parameters
from atorch_ns.testing.workers import catch_ranks, run_ranks

Sample = tuple[Tensor, Tensor]
SIZES = (3, 1, 2, 4)
RATE = 0.5
PIPELINE = [("parallel_mode", ([("pipeline", 2)], None))]
STRATEGIES: dict[str, list[Any]] = {
    "ddp": ["ddp"],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp", "checkpoint"],
    "pipeline": PIPELINE,
    "interleaved": [*PIPELINE, ("pipeline_parallel", {"schedule": "Interleaved1F1B"})],
    "recomputed": [*PIPELINE, ("pipeline_parallel", {"schedule": "pre_recompute_1f1b"}), "checkpoint"],
}


class Counted(nn.Sequential):
    """Counts what it has trained on, as a batch norm does."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        out: Tensor = super().forward(x)
        return out


class Net(nn.Module):
    """Blocks and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counted() for _ in range(4))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def _model() -> Net:
    torch.manual_seed(5)
    return Net()


def _samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size + 1, 6, generator=generator), torch.randn(size + 1, 2, generator=generator))
        for size in SIZES
    ]


def mean_loss(batch: Sample, out: Tensor) -> Tensor:
    """A mean over rows."""
    return (out - batch[1]).square().sum(1).mean()


def sum_loss(batch: Sample, out: Tensor) -> Tensor:
    """A sum over rows."""
    return (out - batch[1]).square().sum()


def _expected(divide: bool) -> dict[str, Tensor]:
    """The parameters after a step of one process on all rows."""
    model = _model()
    x, y = (torch.cat(parts) for parts in zip(*_samples(), strict=True))
    loss = (model(x) - y).square().sum()
    (loss / len(x) if divide else loss).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= RATE * (parameter.grad if divide else parameter.grad / 100)
    return {name: value.detach() for name, value in model.named_parameters()}


def _accelerated(strategy: list[Any], loss_func: Callable[..., Tensor], rate: float = RATE) -> Result:
    _, result, _ = auto_accelerate(
        _model(),
        torch.optim.SGD,
        loss_func=loss_func,
        optim_args={"lr": rate},
        model_input_format="first",
        sample_batch=_samples()[0],
        load_strategy=strategy,
    )
    assert result is not None
    return result


def _own(strategy: list[Any]) -> list[Sample]:
    """Three samples on the first data rank, one on the second; all where ranks share the data."""
    samples = _samples()
    if strategy[0] == PIPELINE[0]:
        return samples
    return samples[:3] if dist.get_rank() == 0 else samples[3:]


def _trained(names: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        strategy = STRATEGIES[name]
        own = _own(strategy)
        rows = [len(x) for x, _ in own]
        result = _accelerated(strategy, mean_loss)
        means = result.train_step.micro_steps(own, weights=rows, outputs=True)
        sums = _accelerated(strategy, sum_loss)
        sums.train_step.micro_steps(own, weights=rows, losses="sums")
        told = _accelerated(strategy, sum_loss)
        told.train_step.micro_steps(
            own, losses="sums", reduction="sum", outputs=True, divisor=lambda out: sum(map(len, out.outputs))
        )
        whole = _accelerated(strategy, sum_loss, RATE / 100)
        whole.train_step.micro_steps(own, losses="sums", reduction="sum")
        idle = _accelerated(strategy, mean_loss)
        other = [(x + 100.0, y) for x, y in own[:1]] * 2
        idle.train_step.micro_steps(
            [*own, *other], weights=[*rows, 7, 7], dummies=[False] * len(own) + [True] * 2
        )
        jobs = {"means": result, "sums": sums, "told": told, "whole": whole, "idle": idle}
        found.append(
            {
                "parameters": {what: whole_parameters(job) for what, job in jobs.items()},
                "loss": float(means.loss),
                "losses": means.losses.tolist(),
                "outputs": [out.clone() for out in means.outputs],
            }
        )
    return found


@pytest.mark.parametrize(
    "names", [("ddp", "zero1"), ("zero2", "fsdp"), ("pipeline", "interleaved", "recomputed")]
)
def test_gradients_are_those_of_one_process_on_all_samples(names: tuple[str, ...]) -> None:
    by_rank = run_ranks(_trained, 2, args=(names,), timeout_s=120)
    model = _model()
    with torch.no_grad():
        outputs = [model(x) for x, _ in _samples()]
        losses = [float(mean_loss(sample, out)) for sample, out in zip(_samples(), outputs, strict=True)]
    rows = [size + 1 for size in SIZES]
    mean = sum(loss * size for loss, size in zip(losses, rows, strict=True)) / sum(rows)
    for place, name in enumerate(names):
        ranks = [each[place] for each in by_rank]
        for what, parameters in ranks[0]["parameters"].items():
            expected = _expected(divide=what != "whole")
            for key, value in expected.items():
                torch.testing.assert_close(
                    parameters[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}, {what}: {key}"
                )
        assert [rank["loss"] for rank in ranks] == pytest.approx([mean] * 2, rel=1e-5)
        shared = STRATEGIES[name][0] == PIPELINE[0]
        own = [slice(0, 4)] * 2 if shared else [slice(0, 3), slice(3, 4)]
        for rank, part in zip(ranks, own, strict=True):
            assert rank["losses"] == pytest.approx(losses[part], rel=1e-5)
            for found, output in zip(rank["outputs"], outputs[part], strict=True):
                torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-6)


def _statistics(strategy: list[Any]) -> list[dict[str, Tensor]]:
    result = _accelerated(strategy, mean_loss)
    samples = _samples()[:2]
    seen = []
    for dummies in ([False, False], [False, True]):
        result.train_step.micro_steps(samples, dummies=dummies)
        seen.append({n: b.clone() for n, b in result.job.module.named_buffers() if not b.is_meta})
    return seen


@pytest.mark.parametrize("name", ["ddp", "pipeline"])
def test_a_dummy_leaves_statistics_alone(name: str) -> None:
    for first, second in run_ranks(_statistics, 2, args=(STRATEGIES[name],), timeout_s=60):
        assert {int(seen) for seen in first.values() if seen.numel()} == {2}
        assert {int(seen) for seen in second.values() if seen.numel()} == {3}


def _inferred(strategy: list[Any]) -> tuple[list[Tensor], list[float], bool]:
    result = _accelerated(strategy, mean_loss)
    assert float(result.mean(dist.get_rank())) in (
        0.5,
        0.0 + dist.get_rank(),
    )  # of data ranks; a pipeline is one
    assert result.world_size == 2
    found = result.train_step.infer(_samples())
    assert all(map(torch.equal, found.outputs, result.infer_step(_samples())))
    return [out.clone() for out in found.outputs], found.losses.tolist(), found.outputs[0].requires_grad


@pytest.mark.parametrize("name", ["fsdp", "interleaved"])
def test_inference_gives_outputs_on_every_rank(name: str) -> None:
    model = _model().eval()
    for outputs, losses, has_gradient in run_ranks(_inferred, 2, args=(STRATEGIES[name],), timeout_s=60):
        assert not has_gradient
        for sample, out, loss in zip(_samples(), outputs, losses, strict=True):
            expected = model(sample[0])
            torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
            assert loss == pytest.approx(float(mean_loss(sample, expected)), rel=1e-5)


class Shown(Net):
    """Also gives what its first block computes, which the loss leaves alone, and a sum of two stages' results."""

    def forward(self, x: Tensor) -> Any:
        first = x = x + self.blocks[0](x)
        for block in self.blocks[1:]:
            x = x + block(x)
        return {"out": self.last(x), "first": 2 * first, "sum": first + x}


def shown_loss(batch: Sample, output: dict[str, Tensor]) -> Tensor:
    return mean_loss(batch, output["out"])


def _shown() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], dict[str, Tensor]]:
    torch.manual_seed(5)
    _, result, _ = auto_accelerate(
        Shown(),
        torch.optim.SGD,
        loss_func=shown_loss,
        optim_args={"lr": RATE, "weight_decay": 0.1},
        model_input_format="first",
        sample_batch=_samples()[0],
        load_strategy=STRATEGIES["pipeline"],
    )
    assert result is not None
    before = result.train_step.infer(_samples()).outputs
    trained = result.train_step.micro_steps(_samples(), outputs=True).outputs
    return list(before), list(trained), whole_parameters(result)


def test_outputs_that_the_loss_does_not_use_come_from_every_stage() -> None:
    torch.manual_seed(5)
    model = Shown()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=0.1)
    expected = [model(sample[0]) for sample in _samples()]
    torch.stack([shown_loss(*pair) for pair in zip(_samples(), expected, strict=True)]).mean().backward()
    optimizer.step()
    for before, trained, weights in run_ranks(_shown, 2, timeout_s=60):
        for outputs in (before, trained):
            for output, wanted in zip(outputs, expected, strict=True):
                for key, value in wanted.items():
                    torch.testing.assert_close(output[key], value.detach(), rtol=1e-5, atol=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def _observed() -> tuple[list[str], list[Any]]:
    result = _accelerated(["ddp"], mean_loss)
    step, seen = result.train_step, list[str]()
    gradients: list[Any] = []
    for phase in PHASES:
        step.observe(phase, lambda phase=phase: seen.append(f"before {phase}"), when="before")
        step.observe(phase, lambda phase=phase: seen.append(f"after {phase}"))
    weight = result.job.module.last.weight
    step.observe("zero", lambda: gradients.append(copy.deepcopy(weight.grad)))
    done = step.observe("reduce", lambda: gradients.append(copy.deepcopy(weight.grad)))
    step(_samples()[0])
    done()
    step(_samples()[0])
    return seen, gradients


def test_every_phase_is_observed_once_a_step_in_order() -> None:
    for seen, gradients in run_ranks(_observed, 2, timeout_s=60):
        assert seen == [f"{when} {phase}" for phase in PHASES for when in ("before", "after")] * 2
        zeroed, reduced, again = gradients
        assert zeroed is None
        assert again is None
        assert reduced.any()


def _fails_on_one_rank() -> None:
    result = _accelerated(["ddp"], mean_loss)

    def fail() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in the hook of a rank")

    result.train_step.observe("reduce", fail, when="before")
    result.train_step.micro_steps(_samples()[:2])
    result.train_step.micro_steps(_samples()[:2])


def test_an_observer_that_raises_on_one_rank_ends_all() -> None:
    first, second = catch_ranks(_fails_on_one_rank, 2, timeout_s=60)
    assert second.error_type == "ZeroDivisionError"
    assert first.error_type == "RankError"
    assert "in the hook of a rank" in first.message


def _fails_between_phases() -> None:
    result = _accelerated(["ddp"], mean_loss)
    step = result.train_step

    def fail() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in a phase of a rank")

    step.observe("update", fail)
    for sample in _samples()[:2]:
        step.zero()
        step.forward_backward(sample)
        step.reduce()
        step.update()
        assert step.num_steps == 1


def test_an_observer_that_raises_in_a_loop_of_ones_own_ends_all() -> None:
    first, second = catch_ranks(_fails_between_phases, 2, timeout_s=60)
    assert second.error_type == "ZeroDivisionError"
    assert first.error_type == "RankError"
    assert "in a phase of a rank" in first.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": [1.0]}, "there are 2 samples, 1 weight."),
        ({"weights": [1.0, -1.0]}, "weights must be numbers from 0 on"),
        ({"weights": [1.0, float("nan")]}, "weights must be numbers from 0 on"),
        ({"weights": [0.0, 0.0]}, "sum to zero"),
        ({"weights": ["many", 1.0]}, "weights is a list of numbers, one for each sample, and is"),
        ({"weights": torch.ones(2, 2)}, "weights is a list of numbers, one for each sample, and is"),
        ({"dummies": [True, True]}, "sum to zero"),
        ({"dummies": 3}, "dummies is a list of flags, one for each sample, and is 3"),
        ({"functions": {"scale_fn": 2.0}}, "scale_fn must be a function, and is a float"),
        ({"samples": []}, "has no micro-batch"),
        ({"samples": torch.zeros(2, 6)}, "is a list of micro-batches, and not a Tensor"),
        ({"losses": "mean"}, "they are 'mean' and 'mean'"),
        ({"reduction": "max"}, "they are 'means' and 'max'"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], words: str) -> None:
    usual = {"weights": None, "dummies": None, "losses": "means", "reduction": "mean", "functions": {}}
    given: dict[str, Any] = {"samples": _samples()[:2], **usual, **fields}
    with pytest.raises(InputError, match=words):
        weigh(**given, outputs=False, data_ranks=None, device=torch.device("cpu"))


def _refused(strategy: list[Any]) -> list[str]:
    result = _accelerated(strategy, mean_loss)
    texts = []
    for weights in ([1.0], [0.0, 0.0]):
        try:
            result.train_step.micro_steps(_samples()[:2], weights=weights if dist.get_rank() else None)
        except AtorchError as error:
            texts.append(str(error))
    with pytest.raises(InputError) as caught:
        result.train_step.micro_steps(_samples()[:2], scale_fn=lambda _: None)  # type: ignore[arg-type,return-value]
    texts.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        result.train_step.micro_steps(_samples()[:2], divisor=None if dist.get_rank() else lambda _: 1.0)
    with pytest.raises(InputError, match="an observer must be a function; it is an int"):
        result.train_step.observe("clip", 3)  # type: ignore[arg-type]
    return [*texts, str(caught.value)]


def test_an_empty_dataset_is_told() -> None:
    with pytest.raises(InputError, match="dataset is empty"):
        auto_accelerate(_model(), torch.optim.SGD, [], mean_loss, optim_args={"lr": 0.1}, load_strategy=[])


def test_a_loss_without_a_gradient_is_told() -> None:
    result = _accelerated([], lambda batch, out: mean_loss(batch, out).detach())
    with pytest.raises(InputError, match="the loss has no gradient: it was detached"):
        result.train_step(_samples()[0])


def test_bad_weights_on_one_rank_are_refused_on_all() -> None:
    first, second = run_ranks(_refused, 2, args=(["ddp"],), timeout_s=60)
    assert "rank 1: there are 2 samples, 1 weight" in first[0]
    assert "there are 2 samples, 1 weight" in second[0]
    for texts in (first, second):
        assert (
            "scale_fn must return the scaled loss as a tensor of one number. It returned a None" in texts[-2]
        )
        assert texts[-1] == "divisor was given on rank 0, but not on rank 1."


def _asked(strategy: list[Any]) -> tuple[list[Tensor], list[str]]:
    """Outputs that one rank wants; and errors after which the next step trains as if there had been none."""
    result = _accelerated(strategy, mean_loss)
    is_asking = dist.get_rank() == 0
    asked = result.train_step.infer(_samples(), outputs=is_asking).outputs
    assert len(result.train_step.micro_steps(_samples(), outputs=not is_asking).outputs) == 4 * (
        not is_asking
    )
    texts = []
    for samples in (_samples()[: 3 + dist.get_rank()], _samples()[:3]):
        with pytest.raises(InputError) as caught:
            result.train_step.micro_steps(samples)
        texts.append(str(caught.value))
    result.train_step.micro_steps(_samples())
    return list(asked), texts


def test_ranks_of_a_pipeline_that_ask_get_outputs_and_lists_that_do_not_fit_end_no_pipeline() -> None:
    strategy = [PIPELINE[0], ("pipeline_parallel", {"schedule": "DualPipeV"})]
    (outputs, texts), (nothing, other) = run_ranks(_asked, 2, args=(strategy,), timeout_s=60)
    model = _model().eval()
    for output, (x, _) in zip(outputs, _samples(), strict=True):
        torch.testing.assert_close(output, model(x).detach(), rtol=1e-5, atol=1e-6)
    assert not nothing
    assert texts == other
    assert "work on the same data" in texts[0]
    assert "have 3 of total weight 3 and 4 of total weight 4" in texts[0]
    assert "3 micro-batches and 4 stages" in texts[1]
