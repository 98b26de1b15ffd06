"""Resuming under the methods that divide a model, saved under others; and evaluating there."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from atorch_ns import checkpoint
from atorch_ns.job import Result
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import (
    Trajectory,
    accelerate_case,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
    whole_parameters,
)
from atorch_ns.testing.workers import run_ranks

SAVED_AT = 2


class Job(NamedTuple):
    """A mesh and the methods on it."""

    num_ranks: int
    axes: dict[str, int]
    methods: tuple[Any, ...] = ()


INTERLEAVED = ("pipeline_parallel", {"schedule": "Interleaved1F1B", "num_micro_batches": 4})
JOBS = {
    "alone": Job(1, {}),
    "fsdp": Job(2, {"zero": 2}, ("fsdp",)),
    "tensor": Job(2, {"tensor": 2}),
    "sequence": Job(2, {"sequence": 2}),
    "pipeline": Job(2, {"pipeline": 2}),
    "interleaved": Job(2, {"pipeline": 2}, (INTERLEAVED,)),
    "expert": Job(2, {"expert": 2}),
    "tensor x zero": Job(4, {"tensor": 2, "zero": 2}, ("fsdp",)),
    "tensor x pipeline": Job(4, {"tensor": 2, "pipeline": 2}),
    "expert x data": Job(4, {"expert": 2, "data": 2}),
    "expert x zero": Job(4, {"expert": 2, "zero": 2}, ("fsdp",)),
    "sequence x data": Job(4, {"sequence": 2, "data": 2}, ("fsdp",)),
}
# Model, saved under, loaded under.
PAIRS = (
    ("hf_gpt2", "tensor", "alone"),
    ("hf_gpt2", "tensor", "fsdp"),
    ("hf_gpt2", "tensor", "pipeline"),
    ("hf_gpt2", "pipeline", "tensor"),
    ("hf_gpt2", "pipeline", "fsdp"),
    ("hf_gpt2", "tensor x zero", "tensor x pipeline"),
    ("hf_gpt2", "tensor x pipeline", "alone"),
    ("hf_gpt2", "tensor x pipeline", "tensor x zero"),
    ("encoder_decoder", "interleaved", "pipeline"),
    ("encoder_decoder", "tensor", "interleaved"),
    ("hf_mixtral", "expert", "alone"),
    ("hf_mixtral", "expert", "pipeline"),
    ("hf_mixtral", "expert", "expert x zero"),
    ("hf_mixtral", "expert x zero", "expert"),
    ("hf_mixtral", "sequence", "expert x data"),
    ("hf_llama", "sequence x data", "alone"),
    ("hf_llama", "sequence x data", "fsdp"),
    ("hf_llama", "tensor x zero", "sequence x data"),
)


def make(case: str, name: str) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = JOBS[name]
        strategy = [("parallel_mode", (list(job.axes.items()), None)), *job.methods] if job.axes else []
        return accelerate_case(get_case(case), strategy)


def _save_all(sources: list[tuple[str, str]], folder: Path) -> None:
    for case, source in sources:
        result = make(case, source)
        batches = iter(result.dataloader)
        for _ in range(SAVED_AT):
            result.train_step(next(batches))
        checkpoint.save(folder / case / source, result)


def _resume_all(pairs: list[tuple[str, str, str]], folder: Path) -> list[Trajectory]:
    return [_resume(make(case, target), folder / case / source) for case, source, target in pairs]


def _resume(result: Result, folder: Path) -> Trajectory:
    checkpoint.load(folder, result)
    initial, losses = whole_parameters(result), []
    for batch in result.dataloader:
        evaluated = result.train_step.evaluate(batch)
        losses.append(float(result.train_step(batch)))
        assert float(evaluated) == pytest.approx(losses[-1], abs=2e-6)
    return Trajectory(losses=losses, initial=initial, final=whole_parameters(result))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    sources = sorted({(case, source) for case, source, _ in PAIRS})
    for case in {case for case, _ in sources}:
        get_case(case).build()  # imports what ranks would import
    for num_ranks in (2, 4):
        chosen = [(case, name) for case, name in sources if JOBS[name].num_ranks == num_ranks]
        run_ranks(_save_all, num_ranks, args=(chosen, folder), timeout_s=120)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_resumed_as_if_never_interrupted(num_ranks: int, saved: Path) -> None:
    pairs = [pair for pair in PAIRS if JOBS[pair[2]].num_ranks == num_ranks]
    ranks = run_ranks(_resume_all, num_ranks, args=(pairs, saved), timeout_s=120)
    references = {case: reference_run(get_case(case)) for case in {case for case, _, _ in pairs}}
    for position, (case, source, target) in enumerate(pairs):
        whole = references[case]
        runs = [rank[position] for rank in ranks]
        try:
            assert_ranks_agree(runs)
            assert_parity(compare(replace(whole, losses=whole.losses[SAVED_AT:]), runs[0]))
            moved = [
                name for name, value in runs[0].initial.items() if not torch.equal(value, whole.initial[name])
            ]
            assert moved  # so the checkpoint was read
        except AssertionError as error:
            raise AssertionError(f"{case}, {source} -> {target}: {error}") from error
