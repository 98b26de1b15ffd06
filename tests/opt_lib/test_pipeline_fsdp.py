"""fsdp in a pipeline: gathered once a step, as one process in its result."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from atorch_ns.engine.trial.report import CollectiveCount
from atorch_ns.errors import StepError
from atorch_ns.job import PeakMemory
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case, accelerated_run, assert_parity, compare, reference_run
from atorch_ns.testing.workers import run_ranks
from benchmarks._storages import measure_peak

MESH = ("parallel_mode", ([("data", 2), ("pipeline", 2)], None))
NUM_SAMPLES = 16


def _strategy(reshard: bool | None, **pipeline: Any) -> list[Any]:
    config = {"num_micro_batches": 4, "split_points": ["layers.2"], **pipeline}
    return [MESH, ("pipeline_parallel", config), ("fsdp", {"reshard_after_forward": reshard})]


def _gathers(strategy: list[Any]) -> int:
    """All-gathers of a step after the second, on this rank."""
    result = accelerate_case(get_case("tied_llama"), strategy, global_batch=NUM_SAMPLES)
    assert result.dataloader is not None
    batches = iter(result.dataloader)
    for _ in range(2):
        result.train_step(next(batches))
    with CollectiveCount() as count:
        result.train_step(next(batches))
    calls, _ = count.totals["all_gather"]
    return int(calls)


def _peak(strategy: list[Any]) -> PeakMemory:
    case = get_case("tied_llama")
    sample = case.make_batch(8, 0)
    batches = (case.make_batch(8, step) for step in range(6))
    return measure_peak(
        lambda: accelerate_case(case, strategy, dataset=None, dataloader_args=None, sample_batch=sample),
        batches,
    )


def _called(strategy: list[Any]) -> str:
    """What a user's own loop is told."""
    result = accelerate_case(get_case("tied_llama"), strategy, global_batch=NUM_SAMPLES)
    assert result.dataloader is not None
    batch = result.prepare_input(next(iter(result.dataloader)), result.job.device)
    with pytest.raises(StepError) as error:
        result.model(*batch) if isinstance(batch, (tuple, list)) else result.model(batch)
    return f"{error.value}\n{result.applied}"


def _on_four() -> tuple[Any, int, int, int, int, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept, freed = _strategy(None), _strategy(True)
        return (
            accelerated_run(get_case("tied_llama"), kept, global_batch=NUM_SAMPLES),
            _gathers(kept),
            _gathers(freed),
            _peak(kept).peak_bytes,
            _peak(freed).peak_bytes,
            _called(kept),
        )


@pytest.mark.slow
def test_parameters_stay_gathered_over_the_micro_batches_of_a_step() -> None:
    get_case("tied_llama").build()
    reference = reference_run(get_case("tied_llama"), global_batch=NUM_SAMPLES)
    for trajectory, kept, freed, peak, peak_freed, said in run_ranks(_on_four, 4, timeout_s=120):
        assert_parity(compare(reference, trajectory))
        assert kept == 2 + 1  # the stage's blocks, and what belongs to none
        assert freed > kept + 2
        # The peak of a small model is made of what its micro-batches keep.
        assert 0.9 * peak_freed <= peak <= 1.1 * peak_freed
        error, applied = said.split("\n", 1)
        for text in (error, applied):
            assert "result.train_step(batch)" in text
            assert "excluded=['pipeline_parallel']" in text
