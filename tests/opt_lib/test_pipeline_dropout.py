"""Dropout in a pipeline: the masks of every schedule and of any number of stages are those that one process draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from atorch_ns.capture.random_states import random_stream
from atorch_ns.job import SharedRandomness
from atorch_ns.pipeline.run.forward_pass import CALL_STRIDE
from atorch_ns.pipeline.run.stage import MICRO_BATCH_STRIDE
from atorch_ns.pipeline.schedule.schedules import SCHEDULES
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import ADAMW, accelerate_case, whole_parameters
from atorch_ns.testing.workers import run_ranks
from tests.pipeline.odd_models import Dropouts, build, mean_loss

USER_SEED = -3
"""Beyond 2**63, as torch gives half of all scripts that set none."""
NUM_STEPS, NUM_MICRO_BATCHES = 3, 8
SAMPLES = [torch.arange(6) % 5 + row % 3 for row in range(8 * NUM_STEPS)]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Run:
    """The losses and parameters of a training, on which batches, and the units in the order of their calls."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    batches: list[torch.Tensor]
    paths: tuple[str, ...]


def _gpt2() -> nn.Module:
    """With the dropout of its default configuration, 0.1 in four places of a block."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=16, n_positions=8)).train()


def _gpt2_loss(batch: Any, output: Any) -> torch.Tensor:
    return mean_loss(batch, output.logits)


MODELS = {"dropouts": (lambda: build(Dropouts), mean_loss), "gpt2": (_gpt2, _gpt2_loss)}


class _Seeded:
    """Gives the calls of units the random streams of a pipeline's: by micro-batch and number of the call."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self.seed = 0
        for number, path in enumerate(paths):
            unit = model.get_submodule(path)
            unit.register_forward_pre_hook(lambda *_, number=number: self._enter(number))
            unit.register_forward_hook(self._leave)

    def _enter(self, number: int) -> None:
        self._stream = random_stream(self.seed + number * CALL_STRIDE, CPU)
        self._stream.__enter__()

    def _leave(self, *_: Any) -> None:
        self._stream.__exit__(None, None, None)


def one_process(name: str, batches: Sequence[torch.Tensor], paths: Sequence[str]) -> Run:
    """Plain PyTorch: the micro-batches one after the other, their gradients summed."""
    make, loss_func = MODELS[name]
    model = make()
    seeded = _Seeded(model, paths)
    randomness = SharedRandomness(seed=USER_SEED % 2**63, data_rank=0, device=CPU)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for batch in batches:
        seed, total = randomness.next_seed(), 0.0
        for number, micro_batch in enumerate(batch.chunk(NUM_MICRO_BATCHES)):
            seeded.seed = seed + number * MICRO_BATCH_STRIDE
            with random_stream(seeded.seed, CPU):
                loss = loss_func(micro_batch, model(micro_batch)) / NUM_MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Run(losses, {key: value.detach() for key, value in model.named_parameters()}, [], ())


def _in_pipeline(name: str, variants: Sequence[tuple[str, dict[str, Any]]]) -> list[Run]:
    make, loss_func = MODELS[name]
    runs = []
    for schedule, given in variants:
        config = dict(given)
        chunk = config.pop("chunk", 1)
        model = make()
        torch.manual_seed(USER_SEED)
        result = accelerate_case(
            get_case("tied_llama"),
            [
                ("parallel_mode", [("pipeline", dist.get_world_size())]),
                (
                    "pipeline_parallel",
                    {"schedule": schedule, "num_micro_batches": NUM_MICRO_BATCHES, **config},
                ),
                *([("checkpoint", {"chunk": chunk})] if schedule in RECOMPUTING or chunk > 1 else []),
            ],
            model=model,
            dataset=SAMPLES,
            loss_func=loss_func,
        )
        batches = list(result.dataloader)
        losses = []
        for batch in batches:
            result.model.eval()
            result.infer_step([batch])  # changes nothing that is drawn after it
            result.model.train()
            losses.append(float(result.train_step(batch)))
        paths = result.train_step._runner._set.paths
        runs.append(Run(losses, whole_parameters(result), batches, paths))
    return runs


RECOMPUTING = [info.name for info in SCHEDULES if info.recomputes]


def _variants(num_ranks: int, num_stages: int) -> list[tuple[str, dict[str, Any]]]:
    """Every schedule that can run so many stages on so many ranks."""
    on_rank = num_stages // num_ranks
    return [
        (info.name, {} if info.is_single else {"stages_per_rank": on_rank})
        for info in SCHEDULES
        if info.fewest_stages <= on_rank <= (info.most_stages or on_rank)
    ]


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages"),
    [
        pytest.param("dropouts", 2, 2, marks=pytest.mark.slow),
        ("dropouts", 2, 4),
        pytest.param("dropouts", 4, 4, marks=pytest.mark.slow),
        ("gpt2", 2, 2),
        pytest.param("gpt2", 2, 4, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, 4, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_trains_as_one_process(name: str, num_ranks: int, num_stages: int) -> None:
    variants = _variants(num_ranks, num_stages)
    if (name, num_stages) == ("gpt2", 2):  # whose blocks follow one another
        variants += [("1F1B", {"chunk": 2}), ("PreRecompute1F1B", {"chunk": 2})]
    by_rank = run_ranks(_in_pipeline, num_ranks, args=(name, variants), timeout_s=200)
    first = by_rank[0][0]
    assert len(first.batches) == NUM_STEPS
    alone = one_process(name, first.batches, first.paths)
    assert len({round(loss, 4) for loss in alone.losses}) == NUM_STEPS
    for variant, runs in zip(variants, zip(*by_rank, strict=True), strict=True):
        for run in runs:
            assert run.losses == pytest.approx(alone.losses, abs=1e-6), variant
            assert run.paths == first.paths
        found = {key: run.parameters[key] for key in alone.parameters}  # tied weights have two names in it
        torch.testing.assert_close(
            found, alone.parameters, rtol=0, atol=1e-6, msg=lambda text, of=variant: f"{of}: {text}"
        )
