"""A loss on parts of the logits: when it is taken, what it trains, and losses that read divided weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.errors import InputError, StepError
from atorch_ns.testing.models import CASES, Case
from atorch_ns.testing.parity import accelerate_case, accelerated_run, compare, reference_run
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.opt_lib.scenarios import plain_loop_step
from tests.opt_lib.tensor_cases import SEQUENCE, TENSOR, by_hand, check, of_model, trajectories
from tests.sharding.tensor_models import VOCAB, FusedParts, make

LLAMA = CASES["tied_llama"]
ALWAYS = ("tensor_parallel", {"parallel_loss": True})
TAKEN = "the loss is computed on parts of the logits"
AMP = ("amp_native", "fp16")


def _own_loss(name: str) -> Case:
    """A case whose model computes its loss from labels."""
    case = CASES[name]

    def batch(size: int, seed: int) -> dict[str, Tensor]:
        made: dict[str, Tensor] = case.make_batch(size, seed)
        return {**made, "labels": made["input_ids"]}

    return replace(case, make_batch=batch, loss_func=lambda batch, output: output.loss)


def _notes(case: Case, strategies: dict[str, Any]) -> dict[str, str]:
    """What the report says of the loss."""
    found = {}
    for what, strategy in strategies.items():
        texts = accelerate_case(case, strategy).job.explained("tensor_parallel")
        found[what] = next((text for text in texts if "logits" in text), "")
    return found


class TestParity:
    """Models that return their logits are among the cases of ``test_tensor_parallel_parity``: auto is the default."""

    @pytest.mark.parametrize("name", ["hf_llama", "hf_gpt2"])
    def test_a_loss_inside_the_model(self, name: str) -> None:
        case = _own_loss(name)
        strategies = {"auto": [TENSOR], "pieces": [TENSOR, SEQUENCE, "checkpoint"]}
        check(case, 2, strategies, max_grad_norm=0.1, gradient_accumulation_steps=2)

    @pytest.mark.slow
    def test_four_ranks(self) -> None:
        mesh = {size: ("parallel_mode", [("tensor", 2), (size, 2)]) for size in ("pipeline", "zero")}
        strategies = {
            "several stages": [mesh["pipeline"], ("pipeline_parallel", {"schedule": "Interleaved1F1B"})],
            "fsdp": [mesh["zero"], "fsdp", "checkpoint"],
        }
        check(LLAMA, 4, strategies)

    def test_a_plain_loop(self) -> None:
        check(_own_loss("hf_gpt2"), 2, {"plain": [TENSOR]}, step=plain_loop_step)

    def test_autocast_and_scaling(self) -> None:
        reference = reference_run(LLAMA, autocast_dtype=torch.float16)
        run = run_ranks(trajectories, 2, args=(LLAMA, {"fp16": [TENSOR, ALWAYS, AMP]}, {}))[0]["fp16"]
        assert compare(run, reference).max_loss_error < 1e-3


def _dropped() -> list[float]:
    result = accelerate_case(by_hand(FusedParts, dropout=0.5), [TENSOR, ALWAYS])
    assert result.dataloader is not None
    return [float(result.train_step(batch)) for batch in result.dataloader]


def test_dropout_on() -> None:
    first, second = run_ranks(_dropped, 2)
    assert first == second
    assert all(0 < loss < 20 for loss in first)


def _outside_of_steps() -> tuple[str, tuple[int, ...], float, float, float]:
    result = accelerate_case(LLAMA, [TENSOR, ALWAYS])
    assert result.dataloader is not None
    assert result.loss_func is not None
    batch = next(iter(result.dataloader))
    evaluated = float(result.train_step.evaluate(batch))
    result.model.eval()
    with torch.no_grad():
        output = result.model(batch)
        loss = result.loss_func(batch, output)
    return type(output).__name__, tuple(output.shape), evaluated, float(loss), float(output.argmax(-1).sum())


def test_the_model_returns_whole_logits_outside_of_steps() -> None:
    for kind, shape, evaluated, loss, _ in run_ranks(_outside_of_steps, 2):
        assert kind == "Tensor"
        assert shape == (8, 16, 64)
        assert evaluated == pytest.approx(loss, rel=1e-6)


def _with_accuracy(batch: Tensor, logits: Tensor) -> Any:
    return LLAMA.loss_func(batch, logits), (logits[:, :-1].argmax(-1) == batch[:, 1:]).float().mean()


def _in_place(batch: Tensor, logits: Tensor) -> Tensor:
    logits[..., 3] = 0.0
    return LLAMA.loss_func(batch, logits)


def _careless(batch: Tensor, logits: Tensor) -> Tensor:
    """Another loss where it is not given a plain tensor."""
    return LLAMA.loss_func(batch, logits) * (1 if type(logits) is Tensor else 2)


class RulesOut(nn.Module):
    """Changes its logits in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make(FusedParts)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens)
        logits[..., VOCAB - 1] = -1e4
        return logits


GATHERS = {
    "accuracy": (replace(LLAMA, loss_func=_with_accuracy), "needed whole by argmax"),
    "no cross-entropy": (replace(LLAMA, loss_func=lambda batch, x: x.pow(2).mean()), "needed whole by pow"),
    "in place": (replace(LLAMA, loss_func=_in_place), "changes them in place, by __setitem__"),
    "other numbers": (replace(LLAMA, loss_func=_careless), "loss or gradients differ by 1.0e+00"),
    "in the model": (of_model(RulesOut), "RulesOut changes them in place, by __setitem__"),
}


def _all_notes() -> dict[str, dict[str, str]]:
    found = {name: _notes(case, {"auto": [TENSOR]}) for name, (case, _) in GATHERS.items()}
    untested = [TENSOR, ("tensor_parallel", {"self_test": False})]
    off = [TENSOR, ("tensor_parallel", {"parallel_loss": False})]
    found["llama"] = _notes(LLAMA, {"auto": [TENSOR], "untested": untested, "off": off})
    found["mlp"] = _notes(CASES["mlp"], {"auto": [TENSOR]})
    return found


def test_auto_takes_it_where_it_is_right_and_else_says_why() -> None:
    notes = run_ranks(_all_notes, 2, timeout_s=120)[1]  # eight jobs; on a busy machine a minute is short
    for name, (_, reason) in GATHERS.items():
        assert notes[name]["auto"].startswith("logits are gathered before the loss: "), name
        assert reason in notes[name]["auto"]
    assert notes["llama"]["auto"] == TAKEN
    assert "self_test=False" in notes["llama"]["untested"]
    assert notes["llama"]["off"] == ""
    assert notes["mlp"]["auto"] == ""


def test_what_would_be_wrong_is_refused() -> None:
    case = replace(LLAMA, loss_func=_in_place)
    for outcome in catch_ranks(accelerate_case, 2, args=(case, [TENSOR, ALWAYS])):
        assert isinstance(outcome.error, InputError), outcome.describe()
        assert "parallel_loss=True cannot be used with TiedLlama: " in outcome.message


def _penalised(batch: Tensor, logits: Tensor) -> Tensor:
    """With a penalty on the loss's gradient with regard to the logits."""
    loss: Tensor = LLAMA.loss_func(batch, logits)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True, allow_unused=True)
    return loss if gradient is None else loss + gradient.square().sum()


def test_gradients_of_divided_logits_are_refused() -> None:
    case = replace(LLAMA, loss_func=_penalised)
    for outcome in catch_ranks(accelerated_run, 2, args=(case, [TENSOR, ALWAYS])):
        assert isinstance(outcome.error, StepError), outcome.describe()
        assert "Set parallel_loss=False" in outcome.message
    check(case, 2, {"auto": [TENSOR]})


def test_what_needs_whole_logits_gets_them() -> None:
    case = replace(LLAMA, loss_func=lambda batch, logits: sum(_with_accuracy(batch, logits), torch.zeros(())))
    check(case, 2, {"always": [TENSOR, ALWAYS]})


class Penalised:
    """A loss with a penalty on the model's weights."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._model: nn.Module | None = None

    def build(self) -> nn.Module:
        """The model whose weights it reads."""
        self._model = LLAMA.build()
        return self._model

    def __call__(self, batch: Any, output: Any) -> Any:
        assert self._model is not None
        weights = [p for name, p in self._model.named_parameters() if "down" in name or "norm" in name]
        if self._how == "whole":
            weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]
        if self._how == "alone":
            return sum(p.pow(2).sum() for p in weights if p.dim() > 1)
        return LLAMA.loss_func(batch, output) + 1e-2 * sum(p.pow(2).sum() for p in weights)

    def case(self) -> Case:
        """Of the model with this loss."""
        return replace(LLAMA, build=self.build, loss_func=self)


class TestDividedWeights:
    @pytest.mark.parametrize("how", ["parts", "alone"])
    def test_parts_count_as_the_whole(self, how: str) -> None:
        check(Penalised(how).case(), 2, {"tensor": [TENSOR], "fsdp": ["fsdp"], "zero2": ["zero2"]})

    def test_the_whole_of_them_can_be_read(self) -> None:
        check(Penalised("whole").case(), 2, {"alone": [TENSOR]})

    def test_other_errors_stay_as_they_are(self) -> None:
        def loss(batch: Any, output: Any) -> Any:
            return F.cross_entropy(output, batch[0])

        def run() -> None:
            result = accelerate_case(replace(LLAMA, loss_func=loss), [TENSOR])
            assert result.dataloader is not None
            result.train_step(next(iter(result.dataloader)))

        for outcome in catch_ranks(run, 2):
            assert not isinstance(outcome.error, StepError)
            assert "batch_size (8)" in outcome.message
